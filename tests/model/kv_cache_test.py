import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.config import CacheConfig, ModelConfig
from jaxserve.model import kv_cache

MODEL = ModelConfig(
  vocab_size=23, hidden_size=12, intermediate_size=7, num_layers=3, num_heads=4, num_kv_heads=2,
  head_dim=6,
)  # fmt: skip
TOKENS = 5


def _values(seed):
  rng = np.random.default_rng(seed)
  return rng.standard_normal((2, TOKENS, 2, 6)).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_write_stores_values_and_drops_padding(dtype):
  cache = CacheConfig(num_pages=7, page_size=3)
  kv = kv_cache.init_kv(MODEL, cache, dtype, "cpu")
  k, v = _values(0)
  slots = np.asarray([4, 20, 0, 21, 22], np.int32)
  kv = kv_cache.write(kv, k, v, layer=1, slot_mapping=slots, dtype=dtype)
  for pool, values in ((kv.k, k), (kv.v, v)):
    expected = np.zeros((3, 21, 2, 6), dtype)
    expected[1, slots[:3]] = values[:3]
    got = np.asarray(pool)
    got = got.view(ml_dtypes.bfloat16) if dtype == jnp.bfloat16 else got
    np.testing.assert_array_equal(got.reshape(expected.shape), expected)


def test_int8_is_within_half_a_unit_of_each_head_and_leaves_others_alone():
  kv = kv_cache.init_kv(MODEL, CacheConfig(num_pages=7, page_size=3), jnp.float32, "cpu", "int8")
  k, v = _values(0)
  k[0] = 0  # no scale to divide by
  slots = np.asarray([4, 20, 0, 21, 22], np.int32)
  kv = kv_cache.write(kv, k, v, layer=1, slot_mapping=slots, dtype=jnp.float32)
  for pages, scales, values in zip(kv.pages(), kv.scales(), (k, v), strict=True):
    got = np.asarray(pages, np.float32) * np.asarray(scales)[..., None]
    expected = np.zeros((3, 21, 2, 6), np.float32)
    expected[1, slots[:3]] = values[:3]
    unit = np.abs(expected).max(-1, keepdims=True) / 127
    assert np.all(np.abs(got.reshape(expected.shape) - expected) <= 0.501 * unit)


def test_pages_numbers_the_pages_of_all_layers():
  kv = kv_cache.init_kv(MODEL, CacheConfig(num_pages=7, page_size=3), jnp.float32, "cpu")
  k, v = _values(1)
  kv = kv_cache.write(kv, k, v, layer=2, slot_mapping=np.arange(15, 20), dtype=jnp.float32)
  k_pages, v_pages = kv.pages()
  assert k_pages.shape == v_pages.shape == (21, 3, 2, 6)
  np.testing.assert_array_equal(k_pages[2 * 7 + 5], k[:3])


def _compiled(num_pages, dtype):
  kv_dtype, dtype = ("int8", jnp.float32) if dtype == jnp.int8 else ("auto", dtype)
  cache = CacheConfig(num_pages=num_pages, page_size=5)
  kv = kv_cache.init_kv(MODEL, cache, dtype, "cpu", kv_dtype)
  call = functools.partial(kv_cache.write, dtype=dtype)

  def all_layers(kv, k, v, slot_mapping):
    step = lambda i, kv: call(kv, k, v, layer=i, slot_mapping=slot_mapping)
    return jax.lax.fori_loop(0, MODEL.num_layers, step, kv)

  jitted = jax.jit(all_layers, donate_argnums=0)
  return kv, jitted.lower(kv, *_values(0), np.arange(TOKENS)).compile().memory_analysis()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.int8])
def test_write_is_in_place_at_any_pool_size(dtype):
  temps = set()
  for num_pages in (11, 1100):
    kv, memory = _compiled(num_pages, dtype)
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(kv))
    temps.add(memory.temp_size_in_bytes)
  assert len(temps) == 1, temps
