"""`experiments.scaling`: verdicts, a small run of every part, and hollow programs."""

import types

import numpy as np
import pytest

from experiments import report
from experiments.scaling import bench, child, config, fit, plot, run
from jaxserve import sched
from jaxserve.engine import Engine, compiler, devices
from jaxserve.model import llama
from tests.testing import caches
from tests.testing.engines import MODEL, SCHEDULER, shared_store, tiny_engine, weights

pytestmark = pytest.mark.one_leg


@pytest.mark.parametrize(
  "y, expected, verdict",
  [
    ([100, 101, 99, 110], "flat", "flat"),
    ([100, 101, 99, 110], "linear", "flat"),
    ([100, 110, 140, 190], "flat", "grows without need"),
    ([100, 200, 400, 800], "linear", "linear"),
    ([500, 600, 800, 1200], "linear", "linear"),
    ([1, 4, 16, 64], "linear", "grows without need"),
    ([100, 101, 104, 300], "linear", "grows without need"),
  ],
)
def test_verdicts(y, expected, verdict):
  assert fit.judge([1, 2, 4, 8], y, expected)["verdict"] == verdict


def test_slope_and_exponent():
  found = fit.judge([1, 2, 4, 8], [7, 9, 13, 21], "linear")
  assert found["slope"] == pytest.approx(2) and found["at_zero"] == pytest.approx(5)
  assert fit.judge([1, 2, 4], [3, 6, 12], "linear")["exponent"] == pytest.approx(1)


def test_the_least_of_the_rounds_medians_counts():
  values = iter([9, 9, 9, 3, 1, 2, 8, 8, 8])
  assert bench.interleaved([lambda: next(values)], 2, 3) == [2e6]


def test_unknown_parts_are_refused():
  with pytest.raises(ValueError, match="only=nothing"):
    config.Config(only=("nothing",))


@pytest.fixture(scope="module")
def small():
  return config.Config(
    cache_dir=caches.cache_dir(), dtype="float32", page_size=5, rows=(1, 2), rows_context=10,
    contexts=(5, 20), contexts_rows=2, tokens=(4, 8), prompt=4, lengths=(20, 40), pools=(1, 4),
    requests=(2, 4), seats=(1,), context=10, rounds=1, steps=2,
  )  # fmt: skip


def test_a_small_run(small):
  model = bench.Weights(types.SimpleNamespace(config=MODEL, params=weights()), "float32")
  points = run.model_points(small, model)
  assert [(p["axis"], p["x"], p["bucket"]) for p in points if "tokens" in p["axis"]] == [
    ("prefill tokens", 4, 4), ("prefill tokens", 8, 8),
  ]  # fmt: skip
  sizes = {"length": 20, "pages": 8, "requests": 4, "rows": 2}
  wanted = [("max_model_len", 20, sizes), ("max_model_len", 40, sizes | {"length": 40})]
  points += run.step_points(small, model, wanted)
  points += run.scheduler_points(small, model, wanted, prefix=True)
  assert all(p["us"] > 0 for p in points)
  verdicts = run.judged(points)
  assert [v["axis"] for v in verdicts[:3]] == ["decode rows", "decode context", "prefill tokens"]
  assert {v["call"] for v in verdicts if v["prefix_cache"]} == set(run._CALLS)
  page = plot.page(points, verdicts, "tiny")
  assert all("<svg" in report.draw(chart, with_png=False)[1] for chart in page.charts)
  assert "max_model_len" in report.text_table(page.rows, page.columns)


def test_hollow_programs_let_an_engine_step_and_compute_nothing():
  like = tiny_engine()
  graphdef, leaves = llama.load(MODEL, weights(), np.dtype("float32"))
  programs = Engine.programs(like.config, graphdef, leaves)
  table = compiler.compile_all(programs, store=shared_store())
  params, where = sched.make_params(SCHEDULER), devices.pick()
  recording = child.Recording(table)
  engine = Engine(like.config, leaves, recording, where, params)
  for row in range(3):
    engine.submit([row] * 5, child.SamplingParams(max_tokens=20, ignore_eos=True))
  seen = [engine.step() for _ in range(8)][-1]
  engine.close()
  forward = next(p for p in programs if p.key == ("forward", 8))
  assert sum(child.kept_arguments(forward)) >= 4
  idle = Engine(
    like.config, leaves, child.hollow_table(programs, table, dict(recording.seen)), where, params
  )
  for row in range(3):
    idle.submit([row] * 5, child.SamplingParams(max_tokens=20, ignore_eos=True))
  for _ in range(60):  # longer than any of them could go on
    events = idle.step()
  assert [part.tokens for part in events.scheduled] == [1, 1, 1]
  assert len(events.outputs) == len(seen.outputs) == 3 and idle.num_requests == 3
  idle.close()


def test_findings_tell_the_host(small):
  host = {
    "part": "host", "rows": 32, "prefix_cache": False, "checkout": "this", "commit": "abc",
    "host_us": 250.0, "step_us": 2000.0,
  }  # fmt: skip
  page = plot.page([host], [], "tiny")
  assert "250 us of a step of 2000 us" in page.findings[0]
  assert "<svg" in report.draw(page.charts[0], with_png=False)[1]
