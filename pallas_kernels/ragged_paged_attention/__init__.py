"""Causal attention of a ragged batch (prefill chunks and single decodes mixed) over paged KV."""

from pallas_kernels.ragged_paged_attention.api import (
  IMPLEMENTATIONS,
  Implementation,
  ragged_paged_attention,
  unsupported,
)

__all__ = ["IMPLEMENTATIONS", "Implementation", "ragged_paged_attention", "unsupported"]
