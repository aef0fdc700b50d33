"""Steps of decodes decided at once are those decided one by one."""

import functools

import chex
import jax
import numpy as np
import pytest

from jaxserve import sched
from jaxserve.config import PlanShape
from jaxserve.pytree import unpack
from jaxserve.sched import packing
from jaxserve.sched.ahead import decodes_go_on, schedule_ahead
from jaxserve.types import Status, unpack_plan
from tests.testing.scheduling import compiled, small_config

MOST = 5
pytestmark = pytest.mark.one_leg
FIELDS = dict(num_pages=11, max_budget=17, reserve="none")


def programs(config):
  shape = PlanShape.of(config, 8, 4, None)
  ahead = jax.jit(functools.partial(schedule_ahead, config=config, shape=shape, most=MOST))
  lay_out = jax.jit(functools.partial(sched.lay_out, shape=shape))
  return shape, ahead, lay_out, jax.jit(decodes_go_on), compiled(config)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("policy", ["vllm_v1", "slo_aware"])
def test_decisions_plans_and_state_are_those_of_single_steps(policy, cached):
  config = small_config(**FIELDS, prefix_cache=cached, policy=policy)
  shape, ahead, lay_out, go_on, (schedule, submit, abort, commit) = programs(config)
  params, like = sched.make_params(config), packing.decision_like(config)
  rng, lengths = np.random.default_rng(0), []
  state = sched.init(config)
  for _ in range(60):
    if rng.random() < 0.4:
      prompt = int(rng.integers(1, 14))
      state, _ = submit(
        state, np.int32(prompt), np.int32(prompt + rng.integers(1, 12)), priority=np.int32(0),
        await_host=np.bool_(rng.random() < 0.1),
      )  # fmt: skip
    if rng.random() < 0.1:
      state = abort(state, np.arange(config.max_requests) == rng.integers(config.max_requests))
    together, number, decisions, plans = ahead(state, params)
    lengths.append(int(number))
    taken = []
    for place in range(int(number)):
      assert place == 0 or bool(go_on(state, taken[-1]))
      state, decision = schedule(state, params)
      taken.append(decision)
      chex.assert_trees_all_equal(unpack(np.asarray(decisions[place]), like), decision)
      if int(number) > 1:
        found = unpack_plan(np.asarray(plans[place]), shape)
        chex.assert_trees_all_equal(found, lay_out(state, decision))
    chex.assert_trees_all_equal(together, state)
    assert int(number) == MOST or not bool(go_on(state, taken[-1]))
    for decision in taken:
      stopped = rng.random(config.max_requests) < 0.1
      state, _ = commit(state, decision, stopped)
  assert lengths.count(1) > 10 and sum(length > 2 for length in lengths) > 5


def test_only_decodes_go_on():
  """One reason at a time to look at the host again."""
  config = small_config(**FIELDS)
  _, _, _, go_on, (schedule, submit, _, _) = programs(config)
  params = sched.make_params(config)

  def after(*requests, steps=2):
    state = sched.init(config)
    for prompt, total, waits in requests:
      state, _ = submit(
        state, np.int32(prompt), np.int32(total), priority=np.int32(0), await_host=np.bool_(waits)
      )
    for _ in range(steps):
      state, decision = schedule(state, params)
    return state, decision

  assert go_on(*after((3, 9, False), (4, 9, False)))
  assert not go_on(*after((3, 9, False), steps=1))  # it computed a prompt
  assert not go_on(*after((3, 5, False)))  # everybody ends with what is in flight
  assert not go_on(*after((3, 9, False), (4, 9, True), steps=1))
  assert not go_on(*after(*[(5, 10, False)] * 5))  # ten pages of eleven are taken
  state, decision = after((3, 9, False))
  state, _ = submit(
    state, np.int32(3), np.int32(9), priority=np.int32(0), await_host=np.bool_(False)
  )
  assert int(np.sum(state.status == Status.WAITING)) == 1 and not go_on(state, decision)
