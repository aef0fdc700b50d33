"""Calibration and fidelity on a tiny engine: what is measured, and that the pages are whole."""

import types

import numpy as np
import pytest

from experiments.calibrate import config as calibrate_config
from experiments.calibrate import measure
from experiments.calibrate import run as calibrate_run
from experiments.fidelity import config, live, plot, run
from jaxserve import sched
from tests.experiments.simulated_test import check_page
from tests.testing.engines import SCHEDULER, tiny_engine

SMALL = calibrate_config.Config(model="tiny", budget=61, seats=5, length=61, rounds=2)


@pytest.fixture(scope="module")
def engine():
  one = tiny_engine()  # the same as in engine_test
  one.warm_up()
  one.set_params(sched.make_params(SCHEDULER, budget=61))
  return one


def test_the_design_tells_costs_apart():
  plans = measure.design((1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256), 8, 1024)
  assert {plan.kind for plan in plans} == {"decode", "prefill", "mixed"}
  assert all(max(plan.context + plan.outputs, plan.prompt + 1) <= 1024 for plan in plans)
  assert {plan.rows for plan in plans if plan.kind == "decode"} == {1, 4, 8}


def test_a_plan_is_measured_as_it_was_meant(engine):
  plan = measure.Plan(kind="mixed", rows=2, context=4, outputs=8, chunk=6, prompt=18)
  works = [key[0] for key, _ in measure.steps_of(engine, plan)]
  assert len(works) == 3 and {work.decodes for work in works} == {2}
  assert [work.pairs for work in works] == [18, 54, 90] and {w.bucket for w in works} == {8}
  assert engine.is_idle and int(engine.params.budget) == 61


def test_calibration_and_its_page(engine):
  plans = [
    *(measure.Plan(kind="decode", rows=r, context=4, outputs=13) for r in (1, 4)),
    *(measure.Plan(kind="prefill", chunk=c, prompt=48) for c in (8, 24)),
    measure.Plan(kind="mixed", rows=2, context=4, outputs=8, chunk=6, prompt=30),
  ]
  seen = measure.observe(engine, plans, 2)
  profile, found = calibrate_run.calibrate(engine, "tiny", seen)
  assert profile.num_params == engine.config.model.num_params and profile.row_buckets == (5,)
  rows = calibrate_run.residuals(seen, found)
  assert [row["kind"] for row in rows] == ["decode", "prefill", "mixed", "all"]
  check_page(calibrate_run.page(SMALL, profile, seen, found, rows))


def test_live_runs_are_predicted_from_calibration(engine, monkeypatch):
  started = types.SimpleNamespace(engine=engine, checkpoint=types.SimpleNamespace(name="tiny"))
  monkeypatch.setattr(calibrate_config, "start", lambda _: started)
  monkeypatch.setattr(measure, "design", lambda *_: [
    *(measure.Plan(kind="decode", rows=r, context=4, outputs=13) for r in (1, 4)),
    *(measure.Plan(kind="prefill", chunk=c, prompt=48) for c in (8, 24)),
  ])  # fmt: skip
  monkeypatch.setattr(engine, "close", lambda: None)
  chosen = config.Config(
    engine=SMALL, requests=10, shares=(0.5, 0.9), prompt=10, output=6, repeats=2
  )  # fmt: skip
  rows, profile, residuals = run.run(chosen)
  assert [row["share"] for row in rows] == [0.5, 0.9] and len(rows[0]["runs"]) == 2
  assert all(row[key] > 0 and row[f"predicted_{key}"] > 0 for row in rows for key in run.FIGURES)
  assert rows[0]["rate"] < rows[1]["rate"]
  check_page(plot.page(chosen, rows, profile, residuals))


def test_more_requests_than_slots_are_held_back(engine):
  load = config.burst(config.Config(engine=SMALL, requests=12, prompt=5, output=4))
  served = live.serve(engine, load)
  assert [len(one.token_times_s) for one in served] == load.num_output.tolist()


def test_within_the_target_or_the_spread():
  row = {"error_a": 0.2, "spread_a": 0.25, "error_b": 0.2, "spread_b": 0.0, "error_c": -0.05,
         "spread_c": 0.0}  # fmt: skip
  assert [run.within(row, key) for key in "abc"] == [True, False, True]


def test_the_figures_are_those_of_the_metrics():
  made = run.row_of(
    0.5, 2.0, [dict.fromkeys(run.FIGURES, x) for x in (1.0, 2.0, 4.0)],
    dict.fromkeys(run.FIGURES, 2.2),
  )  # fmt: skip
  np.testing.assert_allclose([made["error_makespan_s"], made["spread_makespan_s"]], [0.1, 1.5])


def test_an_engine_too_small_is_refused():
  with pytest.raises(ValueError, match="max_model_len=61: must be at least 128"):
    calibrate_config.start(SMALL)
