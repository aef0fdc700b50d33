"""A sweep of budgets over long lives in one XLA call equals the runs one by one, bit by bit."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxserve import sched
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.types import Status

pytestmark = pytest.mark.one_leg

BUDGETS, STEPS, ROWS = 64, 1000, 64
CONFIG = SchedulerConfig(
  cache=CacheConfig(num_pages=480, page_size=8),
  max_num_seqs=ROWS,
  max_requests=ROWS + 16,
  max_budget=ROWS + BUDGETS - 1,
  max_model_len=192,
  reserve="none",
)


def arrivals():
  """A request a step, as (prompt, length at which it ends, submitted at all), i32[STEPS] each."""
  rng = np.random.default_rng(0)
  prompt = rng.integers(1, 49, STEPS)
  total = prompt + rng.integers(20, 140, STEPS)
  busy = np.arange(STEPS) % 400 < 340  # and a lull to recover in
  here = (rng.random(STEPS) < 0.95) & busy
  return tuple(jnp.asarray(x, jnp.int32) for x in (prompt, total, here))


def step(params, state, arrival):
  """One step; the decision, who finished and how many run."""
  prompt, total, here = arrival
  state = lax.cond(here > 0, lambda s: sched.submit(s, prompt, total)[0], lambda s: s, state)
  state, decision = sched.schedule(state, params, CONFIG)
  stopped = decision.samples & (state.num_known % 151 == 0)  # some end before their length
  state, finished = sched.commit(state, decision, stopped)
  running = jnp.sum(state.status == Status.RUNNING, dtype=jnp.int32)
  return state, (decision, finished, running)


def life(budget, load):
  params = jax.tree.map(jnp.asarray, sched.make_params(CONFIG))
  params = dataclasses.replace(params, budget=budget)
  return lax.scan(functools.partial(step, params), sched.init(CONFIG), load)


def test_64_budgets_of_1000_steps_in_one_call_equal_64_runs():
  budgets, load = jnp.arange(ROWS, ROWS + BUDGETS, dtype=jnp.int32), arrivals()
  together = jax.jit(jax.vmap(life, in_axes=(0, None))).lower(budgets, load).compile()
  alone = jax.jit(life).lower(budgets[0], load).compile()
  everything = jax.tree.map(np.asarray, together(budgets, load))
  for lane, budget in enumerate(budgets):
    one = jax.tree.map(lambda x, lane=lane: x[lane], everything)
    chex.assert_trees_all_equal(one, alone(budget, load))
  _, (decision, finished, running) = everything
  assert decision.tokens.shape == (BUDGETS, STEPS, ROWS + 16)
  assert running.max() == ROWS and (decision.preempted.sum(axis=(1, 2)) > 20).all()
  assert (finished.sum(axis=(1, 2)) > 200).all() and (
    decision.admitted.sum(axis=(1, 2)) > 200
  ).all()
  assert len({t.tobytes() for t in decision.num_tokens}) == BUDGETS, "every budget is another life"
