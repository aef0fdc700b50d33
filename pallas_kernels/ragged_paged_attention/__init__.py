"""Causal attention of a ragged batch (prefill chunks and single decodes mixed) over paged KV."""

from pallas_kernels.ragged_paged_attention.api import IMPLEMENTATIONS, ragged_paged_attention

__all__ = ["IMPLEMENTATIONS", "ragged_paged_attention"]
