"""The simulator with a prefix cache: less to compute, the same scheduler."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import sched, sim
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.sim.server import Server
from jaxserve.workload import Workload

CONFIG = SchedulerConfig(
  cache=CacheConfig(num_pages=40, page_size=4), max_num_seqs=3, max_requests=5, max_budget=16,
  max_model_len=64, prefix_cache=True,
)  # fmt: skip


def one_ms(load):
  return jnp.float32(1e-3)


def chats(blocks, gap_s):
  count = len(blocks)
  return Workload(
    arrival_s=np.arange(count) * gap_s, num_prompt=np.full(count, 24), num_output=np.full(count, 6),
    blocks=blocks, block_size=8,
  )  # fmt: skip


def test_equal_blocks_are_computed_once():
  load = chats([[0, 1, 2], [0, 1, 3], [0, 1, 2], [7, 8, 9]], gap_s=1.0)
  result = sim.simulate(load, CONFIG, sched.make_params(CONFIG), one_ms)
  # 16 shared tokens; then all 24, of which the last is computed; then none.
  assert result.cached == 16 + 23
  assert result.tokens == 4 * (24 + 5) - 16 - 23
  assert result.summary()["cached_tokens"] == 39
  # 24 tokens in steps of 16; with 16 or 23 of them there, one step.
  np.testing.assert_allclose(result.ttft_s, [0.002, 0.001, 0.001, 0.002], atol=1e-9)
  off = dataclasses.replace(CONFIG, prefix_cache=False)
  plain = sim.simulate(load, off, sched.make_params(off), one_ms)
  assert plain.cached == 0 and plain.tokens == 4 * 29


def test_sweeps_equal_single_simulations():
  load = chats([[i % 2, 5, i % 3] for i in range(12)], gap_s=0.002)
  config = dataclasses.replace(CONFIG, cache=CacheConfig(num_pages=17, page_size=4))
  params, settings = sim.grid(config, budget=[6, 16])
  lanes = sim.sweep(load, config, params, one_ms)
  for lane, setting in enumerate(settings):
    alone = sim.simulate(load, config, sched.make_params(config, **setting), one_ms)
    for field in dataclasses.fields(alone):
      np.testing.assert_array_equal(
        getattr(lanes.lane(lane), field.name), getattr(alone, field.name), field.name
      )
    assert alone.cached > 0


def test_a_server_of_computed_prompts_has_no_prefix_cache():
  with pytest.raises(ValueError, match="prefix_cache=True"):
    Server(config=CONFIG, step_time=one_ms, handed_over=True)
