"""Calibrates and serves in turn, then predicts what was served from the calibration alone."""

import dataclasses
import statistics

import numpy as np

from experiments import provenance
from experiments.calibrate import config as calibrate_config
from experiments.calibrate import measure
from experiments.calibrate import run as calibrate_run
from experiments.fidelity import live
from experiments.fidelity.config import arriving, burst
from experiments.served import rounded
from jaxserve import metrics, sim
from jaxserve.progress import progress

FIGURES = ("p50_itl_ms", "p99_itl_ms", "p50_ttft_ms", "p99_ttft_ms", "makespan_s")


def figures(requests):
  """What is compared, of requests as the metrics want them."""
  summary = metrics.summarize(requests)
  ends = [request.token_times_s[-1] for request in requests]
  return {key: float(summary[key]) for key in FIGURES[:-1]} | {"makespan_s": float(max(ends))}


def predict(engine, profile, load):
  """The load in virtual time with the engine's own scheduler, buckets and measured costs."""
  config = engine.config
  result = sim.simulate(
    load, config.scheduler, engine.params, sim.profiled(profile),
    overlap=config.overlap, buckets=config.buckets,
  )  # fmt: skip
  return figures(result.requests())


def observe(engine, name, config, seen):
  """One more round of calibration; the profile of all rounds so far."""
  plans = calibrate_run.plans_of(config.engine, engine)
  for one in measure.observe(engine, plans, 1, "Calibrating"):
    old = seen.get((one.kind, one.work))
    times = (old.seconds if old else ()) + one.seconds
    seen[one.kind, one.work] = dataclasses.replace(one, seconds=times)
  return calibrate_run.calibrate(engine, name, list(seen.values()))


def run(config):
  """(rows, one a load; the profile; the residuals of its fit)."""
  started = calibrate_config.start(config.engine)
  engine, name = started.engine, started.checkpoint.name
  seen, measured, averages = {}, {share: [] for share in config.shares}, []
  rates = {}
  with progress(config.repeats * len(config.shares), "runs", "Serving") as bar:
    for repeat in range(config.repeats):
      profile, found = observe(engine, name, config, seen)
      if not rates:
        most = config.requests / predict(engine, profile, burst(config))["makespan_s"]
        rates = {share: float(f"{share * most:.3g}") for share in config.shares}
      for share in config.shares:
        requests = live.serve(engine, arriving(config, rates[share]), seed=repeat)
        measured[share].append(figures(requests))
        averages.append(provenance.load_average())
        bar.advance(1)
  rows = [
    row_of(share, rates[share], measured[share],
           predict(engine, profile, arriving(config, rates[share])))
    for share in config.shares
  ]  # fmt: skip
  engine.close()
  return (
    [row | {"load_average": averages} for row in rows],
    profile,
    calibrate_run.residuals(list(seen.values()), found),
  )


def row_of(share, rate, measured, predicted):
  """Median of the live runs, their spread about it, and the error of the prediction."""
  row = {"share": share, "rate": rate, "runs": [rounded(one) for one in measured]}
  for key in FIGURES:
    values = [one[key] for one in measured]
    middle = statistics.median(values)
    row |= {
      key: middle, f"predicted_{key}": predicted[key],
      f"error_{key}": predicted[key] / middle - 1,
      f"spread_{key}": float(np.ptp(values)) / middle,
    }  # fmt: skip
  return rounded(row)


def within(row, key, target=0.10):
  """Within the target, or within the spread of the live runs where that is larger."""
  return abs(row[f"error_{key}"]) <= max(target, row[f"spread_{key}"])
