"""The scheduler under jit, vmap and scan gives exactly what it gives eagerly."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxserve import sched
from jaxserve.config import PlanShape
from tests.testing.scheduling import small_config

PROMPTS, TOTALS = [7, 9, 3, 12, 5], [19, 31, 28, 23, 30]


def loaded(config):
  state = sched.init(config)
  for num_prompt, total in zip(PROMPTS, TOTALS, strict=True):
    state, _ = sched.submit(state, jnp.int32(num_prompt), jnp.int32(total))
  return state


def one_step(config, state, params):
  state, decision = sched.schedule(state, params, config)
  state, finished = sched.commit(state, decision, jnp.zeros(config.max_requests, bool))
  return state, (decision, finished)


def eager_life(config, params, steps):
  state, outputs = loaded(config), []
  with jax.disable_jit():
    for _ in range(steps):
      state, out = one_step(config, state, params)
      outputs.append(out)
  return state, jax.tree.map(lambda *x: jnp.stack(x), *outputs)


@pytest.mark.parametrize("ordering", ["fcfs", "priority"])
def test_scan_over_steps_equals_eager_steps(ordering):
  config = small_config(ordering=ordering, reserve="none")
  params = jax.tree.map(jnp.asarray, sched.make_params(config))
  life = jax.jit(lambda s: lax.scan(lambda s, _: one_step(config, s, params), s, None, length=12))
  expected = eager_life(config, params, 12)
  chex.assert_trees_all_equal(life(loaded(config)), expected)
  assert np.any(np.asarray(expected[1][0].preempted)), "the case should preempt"


def test_vmap_over_budgets_equals_separate_runs():
  config = small_config()
  params = jax.tree.map(jnp.asarray, sched.make_params(config))
  budgets = jnp.arange(5, 18, dtype=jnp.int32)

  def life(budget):
    swept = dataclasses.replace(params, budget=budget)
    return lax.scan(lambda s, _: one_step(config, s, swept), loaded(config), None, length=15)

  together, alone = jax.jit(jax.vmap(life))(budgets), jax.jit(life)
  for lane, budget in enumerate(budgets):
    one = jax.tree.map(lambda x, i=lane: x[i], together)
    chex.assert_trees_all_equal(one, alone(budget))


def test_schedule_traces_once_for_all_parameters():
  config = small_config()
  chex.clear_trace_counter()
  schedule = jax.jit(chex.assert_max_traces(lambda s, p: sched.schedule(s, p, config), n=1))
  state = loaded(config)
  for budget in (5, 11, 17):
    for chunked in (True, False):
      state, _ = schedule(state, sched.make_params(config, budget=budget, chunked_prefill=chunked))


def test_lay_out_under_jit_equals_eager():
  config = small_config()
  params = jax.tree.map(jnp.asarray, sched.make_params(config))
  state, decision = sched.schedule(loaded(config), params, config)
  shape = PlanShape.of(config, num_tokens=17, query_tile=5)
  jitted = jax.jit(lambda s, d: sched.lay_out(s, d, shape))(state, decision)
  with jax.disable_jit():
    chex.assert_trees_all_equal(jitted, sched.lay_out(state, decision, shape))
