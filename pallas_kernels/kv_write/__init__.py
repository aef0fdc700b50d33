"""Stores the keys and values of a step in their slots of the paged cache, in place."""

from pallas_kernels.kv_write.api import IMPLEMENTATIONS, Implementation, kv_write

__all__ = ["IMPLEMENTATIONS", "Implementation", "kv_write"]
