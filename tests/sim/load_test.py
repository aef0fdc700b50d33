"""Step times against the arithmetic of `jaxserve.cost`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import cost, cost_tables, sim
from jaxserve.cost_profile import Profile, StepCosts, StepWork

MODEL, H100 = cost.LLAMA3_8B, cost.H100


def load(chunks=(), decodes=(), bucket=None):
  """(chunk, prefix) pairs and the contexts of decodes, in slots of 64."""
  rows = [*chunks, *((1, context) for context in decodes)]
  tokens = np.zeros((2, 64), np.int32)
  tokens[:, : len(rows)] = np.asarray(rows).reshape(-1, 2).T
  is_decode = np.arange(64) >= len(chunks)
  return sim.StepLoad(
    tokens=jnp.asarray(tokens[0]), prefix=jnp.asarray(tokens[1]),
    decodes=jnp.asarray(is_decode & (tokens[0] > 0)), samples=jnp.zeros(64, bool),
    bucket=jnp.int32(tokens[0].sum() if bucket is None else bucket),
  )  # fmt: skip


def test_one_chunk_with_decodes_is_chunk_seconds():
  step_time = sim.roofline(MODEL, H100)
  for prefix in (0, 30_240):
    expected = cost.chunk_seconds(MODEL, H100, 2016, prefix, rows=32, resident=32 * 2048)
    found = step_time(load([(2016, prefix)], [2048] * 32))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_decodes_alone_are_decode_seconds():
  found = sim.roofline(MODEL, H100, overhead_s=1e-3)(load(decodes=[2048] * 32))
  np.testing.assert_allclose(found, 1e-3 + cost.decode_seconds(MODEL, H100, 32, 2048), rtol=1e-5)


def test_padding_costs_multiplications():
  step_time = sim.roofline(MODEL, H100)
  found = step_time(load([(600, 0)], bucket=1024)) - step_time(load([(600, 0)]))
  np.testing.assert_allclose(found, cost.gemm_flops(MODEL, 424) / H100.flops, rtol=1e-4)


@pytest.mark.parametrize(
  "chunks", [[(8192, 131_072)], [(16_384, 114_688)], [(100, 7), (333, 4095), (5, 131_000)], []]
)
def test_attended_keys_are_summed_as_integers(chunks):
  expected = sum(c * p + c * c / 2 for c, p in chunks)
  np.testing.assert_allclose(load(chunks, [9, 9]).attended, expected, rtol=2e-7)


def test_the_same_roofline_is_the_same_object():
  """It keys the compiled simulation."""
  assert sim.roofline(MODEL, H100) is sim.roofline(MODEL, H100)
  assert sim.roofline(MODEL, H100, overhead_s=1e-3) is not sim.roofline(MODEL, H100)


def test_a_model_counted_in_whole_numbers_traces():
  """qwen3-32b has more parameters than an int32 holds."""
  model = cost_tables.find_model("qwen3-32b")
  found = jax.jit(sim.roofline(model, H100))(load([(2016, 0)]))
  np.testing.assert_allclose(found, cost.chunk_seconds(model, H100, 2016, 0), rtol=1e-5)


PROFILE = Profile(
  model="some", device="this", dtype="bfloat16", num_params=1, row_buckets=(8, 16),
  costs=StepCosts(
    step_s=1e-3, token_s=1e-4, weights_s=5e-3, pair_s=1e-8, kv_s=1e-6, row_s=1e-5, head_row_s=1e-4
  ),
)  # fmt: skip


@pytest.mark.parametrize("rows", [7, 9, 20])
def test_a_profile_gives_the_measured_time_padding_included(rows):
  """Of the bucket, and of the head: 8 or 16 rows, or as many as there are."""
  step_time = jax.jit(sim.profiled(PROFILE))
  made = load([(33, 100)], [50] * (rows - 1), bucket=64)
  work = StepWork(
    bucket=64, pairs=33 * 116.5, resident=50 * (rows - 1), decodes=rows - 1, head_rows=0
  )  # fmt: skip
  np.testing.assert_allclose(step_time(made), PROFILE.costs.seconds(work), rtol=1e-5)
  made = dataclasses.replace(made, samples=jnp.arange(64) < rows)
  head = {7: 8, 9: 16, 20: 20}[rows]
  expected = PROFILE.costs.seconds(dataclasses.replace(work, head_rows=head))
  np.testing.assert_allclose(step_time(made), expected, rtol=1e-5)


def test_the_same_profile_is_the_same_step_time():
  assert sim.profiled(PROFILE) is sim.profiled(dataclasses.replace(PROFILE))
