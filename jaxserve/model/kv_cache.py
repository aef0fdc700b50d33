"""The paged KV cache: one pool of pages per layer, all layers in one array."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.config import CacheConfig, ModelConfig
from jaxserve.pytree import pytree_dataclass
from pallas_kernels.kv_write import Implementation, kv_write


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


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
  """What a compute dtype is stored as: itself, but on a CPU bfloat16 as its bits.

  XLA:CPU (jax 0.10.2) converts a whole bfloat16 array through float32 to scatter into it. Kernels
  of a GPU load pages as what they are.

  Args:
    dtype: of the matrices.
    platform: of the device that holds the cache: "cpu", "gpu", "tpu".
  """
  as_bits = platform == "cpu" and dtype == jnp.bfloat16
  return jnp.dtype(jnp.uint16 if as_bits else dtype)


def init_kv(config: ModelConfig, cache: CacheConfig, dtype: jnp.dtype, platform: str) -> KVCache:
  """An empty cache for compute dtype `dtype` on a device of `platform`."""
  shape = (
    config.num_layers, cache.num_pages, cache.page_size, config.num_kv_heads, config.head_dim,
  )  # fmt: skip
  stored = storage_dtype(dtype, platform)
  return KVCache(k=jnp.zeros(shape, stored), v=jnp.zeros(shape, stored))


def write(
  kv: KVCache,
  k: jax.Array,
  v: jax.Array,
  *,
  layer: jax.Array | int,
  slot_mapping: jax.Array,
  dtype: jnp.dtype,
  implementation: Implementation = "xla",
) -> KVCache:
  """Stores the step's keys and values of one layer, in place where `kv` is donated.

  Args:
    kv: not to be used afterwards; a later read would force a copy of the pool.
    k: [T, Hkv, D], float; rounded to `dtype`.
    v: [T, Hkv, D].
    layer: in [0, L).
    slot_mapping: i32[T], page * S + offset; distinct, padding at least N * S, which is dropped.
    dtype: compute dtype that `kv` was made for.
    implementation: static, of `pallas_kernels.kv_write`.

  Returns:
    The updated cache.
  """

  def stored(values: jax.Array) -> jax.Array:
    values = values.astype(dtype)
    same = kv.k.dtype == values.dtype
    return values if same else lax.bitcast_convert_type(values, kv.k.dtype)

  num_slots = kv.k.shape[1] * kv.k.shape[2]
  k_pages, v_pages = kv_write(
    *kv.pages(),
    stored(k),
    stored(v),
    slot_mapping=slot_mapping,
    first_slot=layer * num_slots,
    num_slots=num_slots,
    implementation=implementation,
  )
  return KVCache(k=k_pages.reshape(kv.k.shape), v=v_pages.reshape(kv.v.shape))
