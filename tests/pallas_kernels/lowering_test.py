"""The kernels become GPU programs on a machine without a GPU or CUDA."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels.kv_write import mosaic_gpu as kv_write
from pallas_kernels.ragged_paged_attention import arg_specs, config, mosaic_gpu


def _lowered(function, **arrays):
  device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
  mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)
  with use_abstract_mesh(mesh):
    traced = jax.jit(function).trace(**arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
  "model, tokens", [("llama3-8b", 1), ("llama3-8b", 1536), ("smollm2-135m", 96), ("qwen2.5-7b", 96)]
)
def test_attention_lowers(model, tokens):
  spec = arg_specs.of_model(model, tokens)
  call = functools.partial(mosaic_gpu.ragged_paged_attention, **spec.options())
  text = _lowered(call, **spec.arrays())
  assert text.count("mosaic_gpu_v2") == 3


@pytest.mark.parametrize(
  "page_size, dtype, options",
  [
    (16, "float16", {}),
    (32, "bfloat16", {"window": 1000, "soft_cap": 30.0}),
    (128, "bfloat16", {"window": 64}),
  ],
)
def test_page_sizes_and_options_lower(page_size, dtype, options):
  spec = arg_specs.of_model("llama3-8b", 256, page_size=page_size, dtype=dtype)
  call = functools.partial(mosaic_gpu.ragged_paged_attention, **spec.options(), **options)
  assert _lowered(call, **spec.arrays()).count("mosaic_gpu_v2") == 3


@pytest.mark.parametrize("tokens", [1, 96])
def test_kv_write_lowers(tokens):
  pages = jax.ShapeDtypeStruct((64, 64, 8, 128), jnp.bfloat16)
  new = jax.ShapeDtypeStruct((tokens, 8, 128), jnp.bfloat16)
  text = _lowered(
    functools.partial(kv_write.kv_write, num_slots=2048),
    k_pages=pages, v_pages=pages, k=new, v=new,
    slot_mapping=jax.ShapeDtypeStruct((tokens,), jnp.int32),
  )  # fmt: skip
  assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_fit_in_shared_memory(head_dim):
  for tiling in (config.Decode(), config.Chunk()):
    assert tiling.shared_memory(head_dim) < config.SHARED_MEMORY


def test_a_tiling_that_does_not_fit_is_refused():
  with pytest.raises(ValueError, match="padded_group=8, queries=9"):
    config.Decode(queries=9)


def test_items_larger_than_a_tile_are_refused():
  spec = arg_specs.of_model("llama3-8b", 256)
  options = {**spec.options(), "query_tile": 129}
  with pytest.raises(ValueError, match="query_tile=129"):
    _lowered(functools.partial(mosaic_gpu.ragged_paged_attention, **options), **spec.arrays())
