"""Executables kept between starts: found without tracing, never mistaken, never trusted blindly."""

import dataclasses
import functools
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve import sched
from jaxserve.engine import SamplingParams, compiler, store
from jaxserve.engine.executables import CompileGuard
from jaxserve.engine.programs import Program
from jaxserve.engine.store import ExecutableStore, fingerprint
from tests.testing.engines import SCHEDULER, build_engine


def scaled(x, factor):
  return x * factor


def shifted(x, factor):
  return x + factor


def program(fn=scaled, size=4, key=("toy",), donate=(), **static):
  like = jax.ShapeDtypeStruct(
    (size,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
  )
  return Program(key=key, fn=functools.partial(fn, **static), args=(like,), donate=donate)


def compile_one(kept, made):
  table = compiler.compile_all([made], store=kept)
  return table[made.key], table.reports[0]


@pytest.fixture
def kept(tmp_path):
  return ExecutableStore(tmp_path / "executables")


def test_a_second_start_neither_traces_nor_compiles_and_computes_the_same(kept):
  first, cold = compile_one(kept, program(factor=3.0))
  guard = CompileGuard()
  guard.start()
  again, warm = compile_one(kept, program(factor=3.0))
  guard.stop()
  assert guard.count == 0
  assert (cold.cache_hit, warm.cache_hit, warm.trace_s) == (False, True, 0.0)
  assert (cold.temp_bytes, cold.alias_bytes) == (warm.temp_bytes, warm.alias_bytes)
  x = np.arange(4, dtype=np.float32)
  np.testing.assert_array_equal(first(x), again(x))


def test_donation_survives(kept):
  for _ in range(2):
    made = program(fn=shifted, donate=(0,), factor=1.0)
    compiled, report = compile_one(kept, made)
    assert report.alias_bytes == 16
    x = jax.device_put(np.zeros(4, np.float32))
    np.testing.assert_array_equal(compiled(x), np.ones(4))
    assert x.is_deleted()


def test_the_fingerprint_differs_where_the_program_does():
  base = program(factor=3.0)
  others = [
    program(factor=2.0),
    program(fn=shifted, factor=3.0),
    program(size=5, factor=3.0),
    program(key=("toy", 2), factor=3.0),
    program(donate=(0,), factor=3.0),
    dataclasses.replace(base, compiler_options={"xla_cpu_prefer_vector_width": 512}),
  ]
  names = [fingerprint(p) for p in (base, *others)]
  assert fingerprint(program(factor=3.0)) == names[0]
  assert len(set(names)) == len(names) and None not in names


@pytest.mark.parametrize("fn", [lambda x: x, (lambda y: lambda x: x + y)(2.0)])
def test_what_cannot_be_told_apart_is_traced_again_and_found_by_its_module(kept, fn):
  assert fingerprint(program(fn=fn)) is None
  first, cold = compile_one(kept, program(fn=fn))
  again, warm = compile_one(kept, program(fn=fn))
  assert (cold.cache_hit, warm.cache_hit) == (False, True)
  x = np.arange(4, dtype=np.float32)
  np.testing.assert_array_equal(first(x), again(x))


def test_arrays_among_the_static_arguments_have_no_fingerprint():
  assert fingerprint(program(factor=np.ones(4, np.float32))) is None


def test_other_code_with_the_same_module_costs_a_trace_and_no_compilation(kept, monkeypatch):
  compile_one(kept, program(factor=3.0))
  monkeypatch.setattr(store, "_code", lambda: "edited")
  compiled, report = compile_one(kept, program(factor=3.0))
  assert report.cache_hit and report.trace_s > 0
  np.testing.assert_array_equal(compiled(np.ones(4, np.float32)), np.full(4, 3.0))
  assert compile_one(kept, program(factor=3.0))[1].trace_s == 0


def test_other_surroundings_compile_anew(kept, monkeypatch):
  compile_one(kept, program(factor=3.0))
  monkeypatch.setattr(store, "_surroundings", lambda device: "another machine")
  assert not compile_one(kept, program(factor=3.0))[1].cache_hit


@pytest.mark.parametrize("content", [b"", b"garbage", "cut"])
def test_a_damaged_file_is_compiled_again_and_replaced(kept, tmp_path, content):
  compile_one(kept, program(factor=3.0))
  for file in (tmp_path / "executables").iterdir():
    file.write_bytes(file.read_bytes()[:-20] if content == "cut" else content)
  compiled, report = compile_one(kept, program(factor=3.0))
  assert not report.cache_hit
  np.testing.assert_array_equal(compiled(np.ones(4, np.float32)), np.full(4, 3.0))
  assert compile_one(kept, program(factor=3.0))[1].cache_hit


def test_the_folder_is_its_owners_alone_and_keeps_what_was_used_last(kept, tmp_path):
  folder = tmp_path / "executables"
  assert stat.S_IMODE(folder.stat().st_mode) == 0o700
  for factor in (1.0, 2.0, 3.0):
    compile_one(kept, program(factor=factor))
  kept.prune(most=2)
  assert len(list(folder.iterdir())) == 2
  assert compile_one(kept, program(factor=3.0))[1].cache_hit
  assert not compile_one(kept, program(factor=1.0))[1].cache_hit


def test_nothing_is_kept_beside_jaxs_own_cache(kept, tmp_path):
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
  try:
    compile_one(kept, program(factor=3.0))
  finally:
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # it goes on being used otherwise, whatever the option says
  assert not list((tmp_path / "executables").iterdir())


def test_an_engine_starts_again_without_a_trace_and_says_the_same(kept):
  said = []
  for _ in range(2):
    engine = build_engine(store=kept)
    done = engine.generate([[5, 6, 7], [1] * 20], SamplingParams(max_tokens=6))
    said.append(([d.tokens for d in done], engine.retraces))
    reports = engine.compile_reports
    engine.close()
  assert said[0] == said[1] and said[0][1] == 0
  assert all(r.cache_hit and r.trace_s == 0 for r in reports)


def test_a_policy_of_ones_own_is_told_by_what_it_does(kept):
  """Its functions have no names that tell, so its programs are found by their modules."""
  reports = []
  for rule in (sched.POLICIES["vllm_v1"].rule, sched.POLICIES["sarathi"].rule):
    mine = sched.Policy(rule=rule, formula="mine", source="here")
    engine = build_engine(store=kept, scheduler=dataclasses.replace(SCHEDULER, policy=mine))
    reports.append({r.key[0]: r for r in engine.compile_reports})
    engine.close()
  assert reports[1]["forward"].trace_s == 0
  assert not reports[1]["schedule"].cache_hit


def test_read_ahead_is_what_load_then_gives(kept, monkeypatch):
  made = program(factor=3.0)
  compiled, _ = compile_one(kept, made)
  kept.read_ahead([made, program(factor=5.0)])
  reads = []
  monkeypatch.setattr(kept, "_read", lambda *args: reads.append(args))
  x = np.arange(4, dtype=np.float32)
  np.testing.assert_array_equal(kept.load(made)(x), compiled(x))
  assert kept.load(program(factor=5.0)) is None and not reads
