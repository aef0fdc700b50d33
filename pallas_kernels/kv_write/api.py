"""The one entry point, its checks, and the literal table of implementations."""

import importlib
from typing import Literal

import jax

Implementation = Literal["xla", "ref", "numba", "mosaic_gpu"]

# Imported when used: Mosaic GPU needs modules that a CPU run can do without.
IMPLEMENTATIONS: dict[str, str] = {
  "xla": "pallas_kernels.kv_write.xla",
  "ref": "pallas_kernels.kv_write.ref",
  "numba": "pallas_kernels.kv_write.xla",  # one implementation of attention brings one of this
  "mosaic_gpu": "pallas_kernels.kv_write.mosaic_gpu",
}


def kv_write(
  k_pages: jax.Array,
  v_pages: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  slot_mapping: jax.Array,
  first_slot: jax.Array | int = 0,
  num_slots: int,
  implementation: Implementation = "xla",
) -> tuple[jax.Array, jax.Array]:
  """Stores k and v at `first_slot + slot_mapping`; in place if the pages are not used again.

  Args:
    k_pages: [N, S, Hkv, D], where the pages of all layers may lie.
    v_pages: like k_pages.
    k: [T, Hkv, D], of the pages' dtype.
    v: like k.
    slot_mapping: i32[T], page * S + offset, distinct; tokens with `num_slots` or more are dropped.
    first_slot: of the layer; a slot of another layer is never written.
    num_slots: static, slots of one layer.
    implementation: a key of `IMPLEMENTATIONS`.

  Returns:
    The pages with the tokens in their slots.

  Raises:
    NotImplementedError: if the implementation does not exist or cannot do this.
    ValueError: if shapes or dtypes do not fit together.

  Cost: reads and writes 2 T Hkv D elements; the pages are neither read nor copied.
  """
  if implementation not in IMPLEMENTATIONS:
    raise NotImplementedError(
      f"kv_write: no implementation {implementation!r}; there are {sorted(IMPLEMENTATIONS)}"
    )
  _check(k_pages, v_pages, k, v, slot_mapping)
  module = importlib.import_module(IMPLEMENTATIONS[implementation])
  return module.kv_write(
    k_pages, v_pages, k, v, slot_mapping=slot_mapping, first_slot=first_slot, num_slots=num_slots
  )


def _check(
  k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array
) -> None:
  if k_pages.shape != v_pages.shape or k.shape != v.shape or k.shape[1:] != k_pages.shape[2:]:
    raise ValueError(
      f"kv_write: k {k.shape} and v {v.shape} do not fit pages {k_pages.shape}, {v_pages.shape}"
    )
  if not k_pages.dtype == v_pages.dtype == k.dtype == v.dtype:
    raise ValueError(
      f"kv_write: k {k.dtype}, v {v.dtype} and pages {k_pages.dtype}, {v_pages.dtype} must agree"
    )
  if slot_mapping.shape != k.shape[:1]:
    raise ValueError(f"kv_write: slot_mapping {slot_mapping.shape} must be {k.shape[:1]}")
