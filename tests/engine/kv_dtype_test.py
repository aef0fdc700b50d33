"""KV pages of 8 bits: smaller, near, and as independent of how requests are served as any."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxserve import sched
from jaxserve.engine import SamplingParams, attention, startup
from tests.testing.engines import MODEL, SCHEDULER, build_engine, shared_store

FIELDS = dict(token_buckets=(8, 61))
CACHED = dataclasses.replace(SCHEDULER, prefix_cache=True)


@functools.cache
def engines():
  plain = build_engine(shared_store(), **FIELDS)
  return plain, build_engine(shared_store(), **FIELDS, scheduler=CACHED, kv_dtype="int8")


def prompts():
  rng = np.random.default_rng(0)
  stem = rng.integers(0, 61, 22).tolist()
  return [stem[: int(rng.integers(3, 23))] + rng.integers(0, 61, 6).tolist() for _ in range(6)]


def test_a_token_takes_a_byte_a_number_and_a_scale_a_head():
  plain, small = engines()
  slots, heads = SCHEDULER.cache.num_slots, 2 * MODEL.num_layers * MODEL.num_kv_heads
  assert small.kv_bytes == slots * heads * (MODEL.head_dim + 4)
  assert startup.kv_bytes_per_token(small.config) * slots == small.kv_bytes
  assert startup.kv_bytes_per_token(plain.config) * slots == plain.kv_bytes


def test_outputs_do_not_depend_on_budget_neighbours_or_what_is_cached():
  _, small = engines()
  sampling = SamplingParams(max_tokens=9, ignore_eos=True)
  alone = []
  for prompt in prompts():
    small.reset_prefix_cache()
    alone.append(small.generate([prompt], sampling)[0].tokens)
  for budget in (61, 13, 5):
    small.set_params(sched.make_params(CACHED, budget=budget))
    assert [done.tokens for done in small.generate(prompts(), sampling)] == alone
  assert small.prefix_stats.hit > 0 and small.num_free_pages == SCHEDULER.cache.num_pages


def test_the_first_outputs_are_nearly_those_of_whole_pages():
  plain, small = engines()
  sampling = SamplingParams(max_tokens=2, ignore_eos=True)

  def logprobs(engine):
    found = []
    for prompt in prompts():
      engine.submit(prompt, sampling)
      while step := engine.step():
        found += [event.logprob for event in step.outputs]
    return found

  np.testing.assert_allclose(logprobs(small), logprobs(plain), atol=0.05)


def test_kernels_of_a_gpu_leave_it_to_xla():
  target = attention.Target(platform="gpu", kind="H200", compute_capability="9.0", num_sms=132)
  model = dataclasses.replace(MODEL, head_dim=64)
  assert attention.choose("auto", target, model, 64, "int8").implementation == "xla"
  with pytest.raises(NotImplementedError, match="dtype int8"):
    attention.choose("mosaic_gpu", target, model, 64, "int8")
