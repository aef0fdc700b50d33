"""The paged KV cache: one pool of pages per layer, all layers in one array."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.config import CacheConfig, ModelConfig
from jaxserve.pytree import pytree_dataclass
from pallas_kernels.kv_write import Implementation, kv_write

KVDtype = Literal["auto", "int8"]

_TINY = 1e-30


@pytree_dataclass
class KVCache:
  """Keys and values of every page, in the storage dtype (see `storage_dtype`).

  All layers lie in one array, so that a loop over layers can update it in place: a loop that
  carries one array per layer could not index them.

  k: [L, N, S, Hkv, D].
  v: [L, N, S, Hkv, D].
  k_scale: f32[L, N, S, Hkv] where they are int8: a key is its numbers times this. Else None.
  v_scale: like k_scale.
  """

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None

  def pages(self) -> tuple[jax.Array, jax.Array]:
    """Keys and values as [L * N, S, Hkv, D]; layer l's page p is l * N + p."""
    flat = (-1, *self.k.shape[2:])
    return self.k.reshape(flat), self.v.reshape(flat)

  def scales(self) -> tuple[jax.Array | None, jax.Array | None]:
    """Scales of keys and values as [L * N, S, Hkv]; None where there are none."""
    if self.k_scale is None or self.v_scale is None:
      return None, None
    flat = (-1, *self.k_scale.shape[2:])
    return self.k_scale.reshape(flat), self.v_scale.reshape(flat)


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


def init_kv(
  config: ModelConfig, cache: CacheConfig, dtype: jnp.dtype, platform: str,
  kv_dtype: KVDtype = "auto",
) -> KVCache:  # fmt: skip
  """An empty cache for compute dtype `dtype` on a device of `platform`.

  kv_dtype "int8" stores every head's key and value of a token in 8 bits with a scale of its own.
  """
  shape = (
    config.num_layers, cache.num_pages, cache.page_size, config.num_kv_heads, config.head_dim,
  )  # fmt: skip
  if kv_dtype == "int8":
    ones = [jnp.ones(shape[:4], jnp.float32) for _ in range(2)]
    k, v = (jnp.zeros(shape, jnp.int8) for _ in range(2))
    return KVCache(k=k, v=v, k_scale=ones[0], v_scale=ones[1])
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
    k: [T, Hkv, D], float; rounded to `dtype`, or to 8 bits where `kv` is int8.
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
  into = functools.partial(
    kv_write, slot_mapping=slot_mapping, first_slot=layer * num_slots, num_slots=num_slots,
    implementation=implementation,
  )  # fmt: skip
  if kv.k_scale is None or kv.v_scale is None:
    k_pages, v_pages = into(*kv.pages(), stored(k), stored(v))
    return KVCache(k=k_pages.reshape(kv.k.shape), v=v_pages.reshape(kv.v.shape))
  (k, k_scale), (v, v_scale) = _in_8_bits(k), _in_8_bits(v)
  k_pages, v_pages = into(*kv.pages(), k, v)
  # A scale is an element of a head of one.
  wide = (*kv.k_scale.shape[2:], 1)
  old_k, old_v = (scale.reshape(-1, *wide) for scale in (kv.k_scale, kv.v_scale))
  k_scales, v_scales = into(old_k, old_v, k_scale, v_scale)
  return KVCache(
    k=k_pages.reshape(kv.k.shape), v=v_pages.reshape(kv.v.shape),
    k_scale=k_scales.reshape(kv.k_scale.shape), v_scale=v_scales.reshape(kv.v_scale.shape),
  )  # fmt: skip


def _in_8_bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(i8[T, Hkv, D], f32[T, Hkv, 1]) of x [T, Hkv, D]: what is nearest, the largest being 127."""
  x = x.astype(jnp.float32)
  scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), _TINY) / 127
  return jnp.round(x / scale).astype(jnp.int8), scale
