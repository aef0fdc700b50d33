"""Compiled for sm_90a by XLA, Mosaic and ptxas, without a GPU; see `tests.testing.gpu_aot`."""

import pytest

from pallas_kernels.ragged_paged_attention import config
from tests.testing import gpu_aot

pytestmark = pytest.mark.skipif(
  gpu_aot.missing() is not None, reason=f"not installed: {gpu_aot.missing()}"
)
WITH_WGMMA = ("ragged_paged_attention_chunk", "ragged_paged_attention_decode")
KERNELS = {*WITH_WGMMA, "ragged_paged_attention_merge"}
# Registers of the whole block: 65,536 over its threads. Those with two roles give theirs away.
MOST_REGISTERS = {"ragged_paged_attention_chunk": 168}


def _check(kernels, expected):
  assert {kernel["name"] for kernel in kernels} == expected
  for kernel in kernels:
    assert kernel["target"] == "sm_90a"
    assert kernel["spills"] == 0
    assert kernel["registers"] <= MOST_REGISTERS.get(kernel["name"], 255)
    assert kernel["shared_memory"] <= config.SHARED_MEMORY
    if kernel["name"] in WITH_WGMMA:
      assert kernel["wgmma"] and kernel["tma_loads"]
    if kernel["name"] in KERNELS:
      assert kernel["tma_stores"]


# The bucket decides strides and grids but not the code, so few stand for all of a default engine.
@pytest.mark.parametrize(
  "model, tokens, page_size",
  [
    ("llama3-8b", "1,1536", 64),
    ("smollm2-135m", "1536", 64),
    ("qwen2.5-7b", "64", 64),
    ("llama3-8b", "96", 16),
  ],
)
def test_kernels_compile_without_spills(model, tokens, page_size):
  report = gpu_aot.run(
    "kernels", f"--model={model}", f"--tokens={tokens}", "--target=h100", f"--page_size={page_size}"
  )
  _check(report["kernels"], {*KERNELS, "kv_write"})


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama3-8b", "smollm2-135m", "qwen2.5-7b"])
def test_kernels_of_every_bucket_compile_without_spills(model):
  from jaxserve.config import token_buckets

  buckets = ",".join(map(str, token_buckets(8192)))
  report = gpu_aot.run(
    "kernels", f"--model={model}", f"--tokens={buckets}", "--target=h100", timeout=1800
  )
  _check(report["kernels"], {*KERNELS, "kv_write"})


@pytest.mark.parametrize("target", ["h100", "h200"])
def test_a_serving_step_compiles_whole_and_in_place(target):
  report = gpu_aot.run("step", "--tokens=512", f"--target={target}")
  _check(report["kernels"], {*KERNELS, "kv_write"})
  assert report["alias_bytes"] >= report["kv_bytes"]
  assert report["largest_copy"] < report["layer_elements"] / 8
  assert report["temp_bytes"] < report["kv_bytes"] / 8
