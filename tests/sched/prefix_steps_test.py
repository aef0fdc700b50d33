"""Worked steps with a prefix cache."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import sched
from jaxserve.sched import packing
from tests.testing import oracle
from tests.testing.prefix_twins import PrefixTwins, compiled
from tests.testing.scheduling import small_config

CONFIG = small_config(
  num_pages=40, page_size=16, max_budget=256, max_model_len=208, prefix_cache=True
)
PARAMS = oracle.Params(budget=256, max_num_seqs=5)


def text(length, start=0):
  return [start + i for i in range(length)]


def step(twins, params=PARAMS):
  """(tokens by slot, found by slot) of one step, committed at once."""
  _, done = twins.schedule(params)
  twins.commit()
  return done.tokens, done.cached


def test_a_twin_of_the_same_step_computes_what_no_full_page_holds():
  twins = PrefixTwins(CONFIG)
  for _ in range(2):
    twins.submit(text(100), 103)
  assert step(twins) == ({0: 100, 1: 4}, {1: 96})
  table = np.asarray(twins.state.block_tables)
  assert (table[0, :6] == table[1, :6]).all() and table[0, 6] != table[1, 6]


def test_a_request_behind_one_that_is_still_prefilling_shares_its_chunks():
  twins, params = PrefixTwins(CONFIG), oracle.Params(budget=40, max_num_seqs=5)
  twins.submit(text(100), 103)
  assert step(twins, params)[0] == {0: 40}
  twins.submit(text(90), 93)
  # 0 fills 5 pages by the end of this step, of which the budget leaves nothing for 1.
  assert step(twins, params) == ({0: 40}, {})
  assert step(twins, params) == ({0: 20, 1: 10}, {1: 80})


def test_an_aligned_prompt_cached_whole_computes_one_token_or_as_vllm_its_last_page():
  for whole, tokens in ((False, 1), (True, 16)):
    twins = PrefixTwins(dataclasses.replace(CONFIG, recompute_last_page=whole))
    twins.submit(text(48), 49)
    assert step(twins)[0] == {0: 48}
    twins.submit(text(48), 49)
    assert step(twins) == ({0: tokens}, {0: 48 - tokens})


def test_victims_give_back_what_nobody_before_them_holds():
  twins = PrefixTwins(dataclasses.replace(CONFIG, reserve="none"))
  params = oracle.Params(budget=256, max_num_seqs=5)
  twins.submit(text(64), 200)  # 0: pages 0 to 3, and one for its outputs
  twins.submit(text(80), 200)  # 1: those four, and its own
  step(twins, params)
  twins.submit(text(160, start=1000), 200)
  for _ in range(2):
    twins.submit(text(144, start=2000 + len(twins.oracle.requests) * 500), 200)
    step(twins, params)
  preempted = 0
  for _ in range(40):
    _, done = twins.schedule(params)
    twins.commit()
    preempted += len(done.preempted)
    if preempted:
      break
  assert preempted, "the pool of 40 pages is too small for all"


def test_policies_without_a_prefix_cache_say_so():
  with pytest.raises(ValueError, match="prefix_cache=True: policy=sglang .*radix"):
    sched.init(dataclasses.replace(CONFIG, policy="sglang"))


def test_scan_and_vmap_equal_single_calls():
  twins = PrefixTwins(CONFIG)
  for number in range(4):
    twins.submit(text(60 + 20 * (number // 2)), 90)
  schedule, _, _, commit = compiled(CONFIG)
  none = np.zeros(CONFIG.max_requests, bool)
  zeros = np.zeros((CONFIG.max_requests, 4), np.uint32)

  def turn(state, budget):
    params = dataclasses.replace(sched.make_params(CONFIG), budget=budget)
    state, decision = sched.schedule(state, params, CONFIG)
    return sched.commit(state, decision, none, digests=zeros)[0], decision

  budgets = jnp.asarray([[20, 40, 100, 9], [64, 5, 31, 80]], jnp.int32)
  run = lambda budget: jax.lax.scan(turn, twins.state, budget)  # noqa: E731
  together = jax.jit(jax.vmap(run))(budgets)
  for lane in range(2):
    state, decisions = twins.state, []
    for budget in budgets[lane]:
      params = dataclasses.replace(sched.make_params(CONFIG), budget=budget)
      state, decision = schedule(state, params)
      state, _ = commit(state, decision, none, digests=zeros)
      decisions.append(decision)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *decisions)
    chex.assert_trees_all_equal(
      jax.tree.map(lambda x, i=lane: x[i], together), (state, stacked)
    )  # fmt: skip
    assert int(sum(jnp.sum(d.cached) for d in decisions)) > 0


def test_packed_states_hold_everything():
  twins = PrefixTwins(CONFIG)
  twins.submit(text(100), 103)
  step(twins)
  packed = packing.pack_state(twins.state)
  chex.assert_trees_all_equal(packing.unpack_state(packed, CONFIG), twins.state)
