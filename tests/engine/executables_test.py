"""The sealed table, the guard that counts compiles, and the scheduler's own device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import sched
from jaxserve.engine import devices
from jaxserve.engine.executables import (
  CompileGuard,
  CompileReport,
  ExecutableTable,
  MissingExecutableError,
)
from tests.testing.engines import SCHEDULER, tiny_engine


def report(*key, alias_bytes=0):
  return CompileReport(
    key=key, trace_s=0.0, compile_s=0.0, cache_hit=False, temp_bytes=0, alias_bytes=alias_bytes
  )


def test_a_miss_names_what_was_asked_and_what_there_is():
  table = ExecutableTable()
  table.add(lambda: None, report("forward", 8))
  table.seal()
  with pytest.raises(MissingExecutableError, match=r"\('forward', 9\).*\('forward', 8\)"):
    table["forward", 9]


def test_a_sealed_table_takes_nothing_more():
  table = ExecutableTable()
  table.seal()
  with pytest.raises(RuntimeError, match="sealed"):
    table.add(lambda: None, report("forward", 8))


def test_guard_counts_compiles_and_nothing_else():
  guard, double = CompileGuard(), jax.jit(lambda x: x * 2)
  double(jnp.ones(3))
  guard.start()
  double(jnp.ones(3))
  warm = guard.count
  double(jnp.ones(5))
  assert warm == 0 < guard.count
  cold = guard.count
  guard.stop()
  double(jnp.ones(7))
  assert guard.count == cold


def test_a_copied_kv_cache_is_refused_at_start():
  table = ExecutableTable()
  table.add(lambda: None, report("forward", 8, alias_bytes=99))
  table.check_in_place({"forward": 99})
  with pytest.raises(RuntimeError, match="100: it would be copied"):
    table.check_in_place({"forward": 100})


def test_every_forward_updates_the_cache_in_place_with_scratch_below_it():
  tiny = tiny_engine()
  forwards = [r for r in tiny.compile_reports if r.key[0] == "forward"]
  assert len(forwards) == len(tiny.config.buckets)
  assert all(r.alias_bytes >= tiny.kv_bytes for r in forwards)


def test_schedule_returns_while_the_models_device_is_busy():
  where = devices.pick()
  assert where.model != where.scheduler
  schedule = jax.jit(lambda s, p: sched.schedule(s, p, SCHEDULER))
  state = jax.device_put(sched.init(SCHEDULER), where.scheduler)
  params = jax.device_put(sched.make_params(SCHEDULER), where.scheduler)
  jax.block_until_ready(schedule(state, params))

  @jax.jit
  def long_step(x):
    return jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), x)

  x = jax.device_put(np.full((512, 512), 1e-3, np.float32), where.model)
  jax.block_until_ready(long_step(x))
  running = long_step(x)
  state, decision = schedule(state, params)
  assert int(decision.num_tokens) == 0
  assert not running.is_ready(), "schedule should have returned while the step was running"
  jax.block_until_ready(running)
