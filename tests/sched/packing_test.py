"""Scheduling on packed records is scheduling."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import sched
from jaxserve.pytree import pack, unpack
from jaxserve.sched import packing
from tests.testing.scheduling import compiled, small_config

CONFIG = small_config(reserve="none")


def test_a_packed_life_equals_a_plain_one():
  schedule, submit, _, commit = compiled(CONFIG)
  packed_schedule = jax.jit(lambda s, p: packing.schedule(s, p, CONFIG))
  packed_commit = jax.jit(lambda s, d, m: packing.commit(s, d, m, config=CONFIG))
  params = sched.make_params(CONFIG, budget=11)
  state, like = sched.init(CONFIG), packing.decision_like(CONFIG)
  for prompt, total in ((7, 19), (9, 31), (3, 28), (12, 23)):
    state, _ = submit(
      state, np.int32(prompt), np.int32(total), priority=np.int32(0), await_host=np.bool_(False)
    )
  packed = packing.pack_state(state)
  preempted = 0
  for _ in range(20):
    state, decision = schedule(state, params)
    packed, packed_decision = packed_schedule(packed, packing.pack_params(params))
    chex.assert_trees_all_equal(unpack(np.asarray(packed_decision), like), decision)
    stopped = np.arange(CONFIG.max_requests) == 1
    state, finished = commit(state, decision, stopped & (int(state.num_known[1]) > 15))
    packed, packed_finished = packed_commit(
      packed, packed_decision, stopped & (int(state.num_known[1]) > 15)
    )
    np.testing.assert_array_equal(finished, packed_finished)
    chex.assert_trees_all_equal(packing.unpack_state(packed, CONFIG), state)
    preempted += int(np.sum(decision.preempted))
  assert preempted


def test_a_function_on_packed_states_returns_what_the_plain_one_does():
  packed = packing.pack_state(sched.init(CONFIG))
  packed, slot = packing.call(sched.submit, packed, jnp.int32(5), jnp.int32(9), config=CONFIG)
  assert int(slot) == 0
  who = jnp.arange(CONFIG.max_requests) == 0
  packed = packing.call(sched.abort, packed, who, config=CONFIG)
  fields = packing.small_fields(np.asarray(packed.numbers), CONFIG)
  assert fields.num_submitted == 1 and (fields.status == 0).all()
  assert fields.pool.num_free == CONFIG.cache.num_pages


def test_pack_keeps_types_and_values_of_any_tree():
  tree = {"a": jnp.arange(3, dtype=jnp.int32), "b": jnp.asarray([[True], [False]])}
  back = unpack(pack(tree), tree)
  chex.assert_trees_all_equal_shapes_and_dtypes(back, tree)
  chex.assert_trees_all_equal(back, tree)


@pytest.mark.parametrize("fields", [{}, {"prefix_cache": True}, {"max_drafts": 2}], ids=str)
def test_the_shapes_of_a_decision_are_those_that_schedule_returns(fields):
  config = small_config(**fields)
  state, params = sched.init(config), sched.make_params(config)
  traced = jax.eval_shape(lambda: sched.schedule(state, params, config)[1])
  assert packing.decision_like(config) == traced
