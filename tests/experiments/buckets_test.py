"""`experiments.buckets`: the token counts of a load's steps, and the buckets that fit them."""

import itertools

import numpy as np
import pytest

from experiments import report, served
from experiments.buckets import plot, run
from jaxserve import sim, workload
from jaxserve.config import token_buckets

pytestmark = pytest.mark.one_leg


def total_cost(counts, cost_of, table):
  return (counts * cost_of[np.asarray(table)[np.searchsorted(table, range(len(counts)))]]).sum()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_best_buckets_are_those_of_an_exhaustive_search(most):
  rng = np.random.default_rng(most)
  for _ in range(5):
    counts, cost_of = rng.integers(0, 9, 12), np.sort(rng.uniform(1, 9, 12))
    counts[0] = 0
    tables = [(*small, 11) for small in itertools.combinations(range(1, 11), most - 1)]
    found = run.best(counts, cost_of, most)
    assert found[-1] == 11 and len(found) <= most
    least = min(total_cost(counts, cost_of, table) for table in tables)
    assert total_cost(counts, cost_of, found) == pytest.approx(least)


def test_padding_and_its_cost():
  counts, cost_of = np.array([0, 1, 0, 2, 0]), np.array([0.0, 1, 1, 1, 2])
  assert run.padding(counts, (1, 4), cost_of) == (pytest.approx(2 / 9), pytest.approx(5 / 3))


def test_a_loads_steps_are_those_of_its_simulation():
  rng, count = np.random.default_rng(0), 40
  load = workload.Workload(
    arrival_s=workload.gamma_arrivals(rng, count, rate=20.0, cv=1.0),
    num_prompt=workload.lognormal(rng, count, median=90, sigma=1.0, high=400),
    num_output=workload.fixed(count, 6),
  )
  server = served.Server(seats=8, length=512, kv_tokens=8_000)
  counts = run.token_counts(load, server, 96)
  config = server.scheduler(budget=96)
  params = run.sched.make_params(config, budget=96)
  result = sim.simulate(load, config, params, server.step_time(), buckets=token_buckets(96))
  assert counts.sum() == result.steps and (counts * np.arange(97)).sum() == result.tokens
  share, _ = run.padding(counts, token_buckets(96), np.arange(97.0))
  assert share == pytest.approx(result.summary()["padding_share"])
  rows = [{"load": "x", "policy": "p"} | row
          for row in run.compare(counts, np.arange(97.0), 96, [3, 9])]  # fmt: skip
  assert rows[2]["padding_share"] < rows[1]["padding_share"]
  page = plot.page(rows, {"x, p": counts}, "a server")
  assert all("<svg" in report.draw(chart, with_png=False)[1] for chart in page.charts)
