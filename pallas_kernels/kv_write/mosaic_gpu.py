"""Pallas Mosaic GPU: a few tokens per block, moved by the copy engine through shared memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat

Ref = Any
_TOKENS = (8, 4, 2, 1)  # of a block; the first that divides T


def kv_write(
  k_pages: jax.Array,
  v_pages: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  slot_mapping: jax.Array,
  first_slot: jax.Array | int = 0,
  num_slots: int,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """See `api.kv_write`; `interpret` see `compat.kernel`.

  Raises:
    NotImplementedError: if Hkv * D elements are no multiple of 128 bytes, or D is above 256.
  """
  tokens, heads, dim = k.shape
  if heads * dim * k.dtype.itemsize % 128 or dim > 256:
    raise NotImplementedError(
      f"kv_write 'mosaic_gpu': {heads} heads of {dim} {k.dtype}; a token must be a multiple of 128 "
      "bytes and a head at most 256 elements"
    )
  count = next(n for n in _TOKENS if tokens % n == 0)
  flat = (-1, *k_pages.shape[2:])
  pools = tuple(jax.new_ref(x.reshape(flat)) for x in (k_pages, v_pages))
  first = jnp.asarray(first_slot, jnp.int32).reshape(1)

  def body(*refs: Ref) -> None:
    _kernel(count, num_slots, *refs)

  compat.kernel(
    body, name="kv_write", grid={"block": tokens // count}, warpgroups=1, interpret=interpret
  )(slot_mapping, first, k, v, *pools)
  return pools[0][...].reshape(k_pages.shape), pools[1][...].reshape(v_pages.shape)


def _kernel(
  count: int, num_slots: int, slots: Ref, first: Ref, k: Ref, v: Ref, k_pool: Ref, v_pool: Ref
) -> None:
  """Tokens [block * count, (block + 1) * count)."""
  begin = lax.axis_index("block") * count

  def move(k_s: Ref, v_s: Ref, loaded: Ref) -> None:
    for source, buffer in ((k, k_s), (v, v_s)):
      plgpu.copy_gmem_to_smem(source.at[pl.ds(begin, count)], buffer, loaded.at[0])
    plgpu.barrier_wait(loaded.at[0])
    for i in range(count):
      slot = slots[begin + i]

      @pl.when(slot < num_slots)
      def _(i: int = i, slot: jax.Array = slot) -> None:
        for buffer, pool in ((k_s, k_pool), (v_s, v_pool)):
          plgpu.copy_smem_to_gmem(buffer.at[pl.ds(i, 1)], pool.at[pl.ds(first[0] + slot, 1)])

    plgpu.wait_smem_to_gmem(0)

  buffer = plgpu.SMEM((count, *k.shape[1:]), k.dtype)
  pl.run_scoped(
    move, buffer, buffer, plgpu.Barrier(num_arrivals=2, num_barriers=1), collective_axes="wg"
  )
