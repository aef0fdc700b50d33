"""The paged KV cache: one pool of pages per layer, all layers in one array."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.config import CacheConfig, ModelConfig
from jaxserve.pytree import pytree_dataclass


@pytree_dataclass
class KVCache:
  """Keys and values of every page, in the storage dtype (see `storage_dtype`).

  All layers lie in one array, so that a loop over layers can update it in place: a loop that
  carries one array per layer could not index them.

  k: [L, N, S, Hkv, D].
  v: [L, N, S, Hkv, D].
  """

  k: jax.Array
  v: jax.Array

  def pages(self) -> tuple[jax.Array, jax.Array]:
    """Keys and values as [L * N, S, Hkv, D]; layer l's page p is l * N + p."""
    flat = (-1, *self.k.shape[2:])
    return self.k.reshape(flat), self.v.reshape(flat)


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
  """What a compute dtype is stored as: bfloat16 as its bits.

  XLA:CPU (jax 0.10.2) converts a whole bfloat16 array through float32 to scatter into it.
  """
  return jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 else jnp.dtype(dtype)


def init_kv(config: ModelConfig, cache: CacheConfig, dtype: jnp.dtype) -> KVCache:
  """An empty cache for compute dtype `dtype`."""
  shape = (
    config.num_layers, cache.num_pages, cache.page_size, config.num_kv_heads, config.head_dim,
  )  # fmt: skip
  stored = storage_dtype(dtype)
  return KVCache(k=jnp.zeros(shape, stored), v=jnp.zeros(shape, stored))


def write(
  kv: KVCache,
  k: jax.Array,
  v: jax.Array,
  *,
  layer: jax.Array | int,
  slot_mapping: jax.Array,
  dtype: jnp.dtype,
) -> KVCache:
  """Stores the step's keys and values of one layer, in place where `kv` is donated.

  Args:
    kv: not to be used afterwards; a later read would force a copy of the pool.
    k: [T, Hkv, D], float; rounded to `dtype`.
    v: [T, Hkv, D].
    layer: in [0, L).
    slot_mapping: i32[T], page * S + offset; distinct, padding at least N * S, which is dropped.
    dtype: compute dtype that `kv` was made for.

  Returns:
    The updated cache.
  """
  if len(k) == 1:
    # XLA turns a scatter of one row into an update that copies the pool; a second row is dropped.
    k, v = (jnp.concatenate([x, x]) for x in (k, v))
    outside = kv.k.shape[1] * kv.k.shape[2] + 1
    slot_mapping = jnp.concatenate([slot_mapping, jnp.full_like(slot_mapping, outside)])
  page_size = kv.k.shape[2]
  page, offset = slot_mapping // page_size, slot_mapping % page_size
  where = jnp.full_like(page, layer), page, offset

  def stored(pool: jax.Array, values: jax.Array) -> jax.Array:
    values = values.astype(dtype)
    if pool.dtype != values.dtype:
      values = lax.bitcast_convert_type(values, pool.dtype)
    return pool.at[where].set(values, mode="drop", unique_indices=True)

  return KVCache(k=stored(kv.k, k), v=stored(kv.v, v))
