"""`python -m experiments.gpu_check` on tiny sizes, and what it does when a case hangs or breaks."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments.gpu_check import (
  batches,
  config,
  driver,
  floors,
  numerics,
  plot,
  records,
  stages,
  table,
)
from jaxserve.config import SplitKV
from pallas_kernels import compat
from tests.testing import caches

SPLITS = SplitKV(capacity=3)


def check(*arguments):
  command = [sys.executable, "-m", "experiments.gpu_check", *map(str, arguments)]
  # Nothing is measured here, so what XLA makes need not be fast.
  environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
  return subprocess.run(
    command, capture_output=True, text=True, timeout=280, check=False, env=environment
  )


def lines(folder):
  return [json.loads(text) for text in (folder / "results.jsonl").read_text("utf-8").splitlines()]


def test_all_stages_run_on_tiny_sizes_and_resume_repeats_none(tmp_path):
  arguments = f"--output_dir={tmp_path}", f"--executables={caches.cache_dir() / 'gpu_check'}"
  done = check(*arguments, "--interpret")
  assert done.returncode == 0, done.stdout + done.stderr
  found = lines(tmp_path)
  ended = {(v["stage"], v["case"]): v for v in found if v["status"] != "begin"}
  states = {stage: {v["status"] for (s, _), v in ended.items() if s == stage}
            for stage in config.STAGES}  # fmt: skip
  kernels = {"ok"} if compat.HAS_INTERPRETER else {"absent"}
  ok = {stage: {"ok"} for stage in ("machine", "engine", "decode", "prefill", "serving")}
  assert states == ok | {
    "numerics": kernels, "torch": {"absent"}, "cudnn": {"absent"}, "others": {"absent"},
  }  # fmt: skip
  serving = ended["serving", "budget 16"]
  assert [s["chunk"] for s in serving["steps"]] == [14, 14, 14, 14]
  assert all(s["ms"] > 0 and s["decodes"] == 2 for s in serving["steps"])
  assert ended["decode", "batch 2 context 64"]["implementation"] == "xla"
  assert "decode (xla), KV GB/s" in done.stdout and "\nbudget" in done.stdout
  assert done.stdout.splitlines()[-1].endswith("0 failed")

  again = check(*arguments, "--interpret", "--resume", "--stages=machine,decode,prefill")
  assert again.returncode == 0, again.stdout + again.stderr
  assert lines(tmp_path) == found  # nothing ran
  assert "decode (xla), KV GB/s" in again.stdout


@pytest.fixture
def results(tmp_path):
  return records.Records(tmp_path / "results.jsonl", "this run", resume=False)


def test_a_case_that_fails_or_is_absent_or_late_does_not_stop_the_others(results, monkeypatch):
  def fail():
    raise stages.Failed("wrong", error_size=3.0)

  def absent():
    raise stages.Absent("not there")

  def broken():
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

  calls = {"a": fail, "b": absent, "c": lambda: {"seconds": 1}, "d": broken, "e": dict}
  module = type(sys)("made_up")
  module.cases = lambda settings, records: iter(calls.items())
  monkeypatch.setitem(sys.modules, "made_up", module)
  monkeypatch.setitem(stages.MODULES, "machine", "made_up")
  later = time.monotonic() + 60
  assert not stages.run("machine", config.TINY, results, later)  # d needs a new process
  states = lambda: {case: v["status"] for (_, case), v in results.finished().items()}
  assert states() == {"a": "failed", "b": "absent", "c": "ok", "d": "failed"}
  assert stages.run("machine", config.TINY, results, time.monotonic() - 1)
  assert states()["e"] == "no time"
  assert stages.run("machine", config.TINY, results, later)  # d is not tried again
  assert states()["e"] == "ok"
  assert [v["case"] for v in table.failures(results)] == ["a", "d"]
  assert results.finished()["machine", "a"]["error_size"] == 3.0


def test_a_hung_case_costs_itself_and_a_crash_too(results):
  # The child hangs in `hangs`, dies in `dies` and then works.
  code = """
import json, os, sys, time
path, run = sys.argv[1:]
done = {json.loads(t)["case"] for t in open(path)} if os.path.exists(path) else set()
for case in ("hangs", "dies", "works"):
  if case in done:
    continue
  def say(status):
    with open(path, "a") as file:
      line = {"stage": "machine", "case": case, "status": status, "run": run}
      file.write(json.dumps(line) + "\\n")
  say("begin")
  if case == "hangs":
    time.sleep(60)
  if case == "dies":
    os.abort()
  say("ok")
"""
  command = lambda stage, seconds: [sys.executable, "-c", code, str(results.path), "this run"]
  settings = dataclasses.replace(
    config.TINY, stages=("machine",), case_seconds={"": 2.0}, seconds=300
  )
  said = []
  driver.run(settings, results, command, said.append)
  found = {case: v for (_, case), v in results.finished().items()}
  assert {case: v["status"] for case, v in found.items()} == {
    "hangs": "failed", "dies": "failed", "works": "ok",
  }  # fmt: skip
  assert "no result for 2" in found["hangs"]["error"]
  assert "ended with code -6" in found["dies"]["error"]


def test_a_stage_that_cannot_start_is_a_failure(results):
  settings = dataclasses.replace(config.TINY, stages=("machine", "decode"), seconds=300)
  command = lambda stage, seconds: [sys.executable, "-c", "raise SystemExit(3)"]
  driver.run(settings, results, command, lambda words: None)
  failed = [(v["stage"], v["case"]) for v in table.failures(results)]
  assert failed == [("machine", "start"), ("decode", "start")]


def test_resume_takes_what_went_well_with_the_same_sources(tmp_path):
  path = tmp_path / "results.jsonl"
  before = records.Records(path, "before", resume=False)
  before.append("decode", "good", "ok", gb_per_s=1)
  before.append("decode", "bad", "failed", error="x")
  with path.open("a") as file:
    file.write('{"cut')
  after = records.Records(path, "after", resume=True)
  assert after.is_done("decode", "good") and not after.is_done("decode", "bad")
  assert not records.Records(path, "after", resume=False).is_done("decode", "good")
  after.source = "other"
  assert not after.is_done("decode", "good")


@pytest.mark.parametrize("case", config.FULL.numerics[:-1], ids=lambda case: case.key)
def test_batches_hold_what_they_should_and_the_judge_sees_errors(case):
  batch = batches.Poisoned(case, SPLITS, seed=3)
  parts = batch.parts()
  assert sum(map(len, parts.values())) == sum(row.tokens for row in batch.rows)
  assert parts["merge"] or not case.decodes or max(case.decodes) < 300
  expected = batch.expected()
  assert np.isfinite(expected).all()
  rounded = expected.astype(batch.dtype)
  limit = numerics.LIMITS[case.dtype]
  assert numerics.judge(batch, [rounded, rounded], expected, limit)["equal_runs"]
  for spoil in (1.05, np.nan):
    wrong = rounded.copy()
    wrong[next(q for q in parts.values() if len(q))] *= spoil
    with pytest.raises(stages.Failed, match="error above"):
      numerics.judge(batch, [wrong], expected, limit)
  other = rounded.copy()
  other[0] += 1
  with pytest.raises(stages.Failed, match="a race"):
    numerics.judge(batch, [rounded, other], expected, limit)
  leak = rounded.copy()
  leak[-1] = 1
  with pytest.raises(stages.Failed, match="not zero"):
    numerics.judge(batch, [leak], expected, limit)


def test_pools_hold_nan_wherever_no_row_has_written():
  case = dataclasses.replace(config.FULL.numerics[0], decodes=(3, 70), chunks=((5, 60),))
  batch = batches.Poisoned(case, SPLITS, seed=3)
  k, v = (np.asarray(x, np.float32) for x in batch.pools())
  written = sum(row.tokens + row.context for row in batch.rows)
  for pool in (k, v):
    assert np.isfinite(pool).all((2, 3)).sum() == written
    assert (np.isfinite(pool).any((2, 3)) == np.isfinite(pool).all((2, 3))).all()


def test_floors_are_the_formulas():
  shape = config.LLAMA3_8B
  assert shape.kv_bytes == 4096
  assert floors.decode_flops(shape, 32, 4096) == 4 * 32 * 128 * 32 * 4096
  # Causal pairs, counted.
  pairs = sum(100 + i + 1 for i in range(7))
  assert floors.chunk_flops(shape, 7, 100) == 4 * 32 * 128 * pairs
  found = floors.decode(shape, 32, 4096, floors.H200, items=32)
  assert found.bytes < found.target < found.predicted and found.flops < found.bytes
  assert found.target == pytest.approx(found.bytes / 0.8)
  assert floors.decode(shape, 8, 4096, floors.H200, items=33).target is None
  chunk = floors.chunk(shape, 2048, 0, floors.H200)
  assert chunk.target == pytest.approx(floors.chunk_flops(shape, 2048, 0) / 550e12)
  assert floors.occupied(132, 132) == 1 and floors.occupied(133, 132) == 133 / 264


def test_notes_hold_the_tables_that_the_formulas_give():
  notes = (records.ROOT / "experiments/kernel_notes.md").read_text("utf-8")
  for part in floors.markdown().split("\n\n"):
    assert part in notes


def test_without_results_the_table_says_so(results):
  text = table.render(config.FULL, results)
  assert text.startswith("machine: not measured") and "decode (not measured)" in text


def test_plots(results, tmp_path):
  pytest.importorskip("matplotlib")
  results.append("decode", "a", "ok", batch=1, context=64, gb_per_s=3.0, implementation="xla")
  results.append("machine", "copy", "ok", bytes_per_s=4e9)
  assert plot.draw(config.TINY, results, tmp_path).startswith("plots of decode in")
  assert {p.name for p in tmp_path.glob("*.*g")} == {"decode.png", "decode.svg"}
