"""The recorded requests in virtual time, and what the recorder measured of the same ones."""

import dataclasses
import json
import pathlib

import numpy as np

from experiments import served
from experiments.store import digest, workload_digest
from experiments.vllm_4090 import profile
from experiments.vllm_4090.config import STEM
from jaxserve import sched, sim, workload

MEASURED = "measured"
# What the simulator is told beside step times; the first is what vLLM 0.19 does.
VARIANTS = (
  {"overlap": True, "reserve": "gate"},
  {"overlap": False, "reserve": "gate"},
  {"overlap": True, "reserve": "none"},
)
QUANTILES = tuple(range(101))
_STAMPS = ("queued_ts", "first_token_ts", "last_token_ts")


def recorded(path):
  """(workload that arrives when the engine queued it, measured times of every request)."""
  load = workload.read(path)
  rows = [json.loads(line) for line in pathlib.Path(path).read_text("utf-8").splitlines() if line]
  for number, row in enumerate(rows, 1):
    for key in _STAMPS:
      if not isinstance(row.get(key), int | float):
        raise ValueError(f"{path}:{number}: {key}={row.get(key)!r}: a time in seconds is needed")
  rows.sort(key=lambda row: row["arrival_time"])
  queued, first, last = (np.array([row[key] for row in rows]) for key in _STAMPS)
  # Engine and client have clocks of their own; those of the engine rise with the arrivals.
  load = dataclasses.replace(load, arrival_s=np.maximum.accumulate(queued - queued[0]))
  return load, measured(first - queued, last - queued, load.num_output, last.max() - queued[0])


def measured(ttft, e2e, outputs, makespan):
  """The figures that the recorder and the simulator share."""
  return {
    "ttft_s": ttft, "e2e_s": e2e, "tpot_ms": 1e3 * (e2e - ttft)[outputs > 1] /
    (outputs[outputs > 1] - 1), "makespan_s": makespan,
  }  # fmt: skip


def numbers(times):
  """Means, quantiles, and the curve of every figure."""
  row = {"makespan_s": float(times["makespan_s"])}
  for key in ("ttft_s", "tpot_ms", "e2e_s"):
    row[f"mean_{key}"] = float(times[key].mean())
    for q in (50, 90, 99):
      row[f"p{q}_{key}"] = float(np.percentile(times[key], q))
    row[f"curve_{key}"] = [float(f"{x:.5g}") for x in np.percentile(times[key], QUANTILES)]
  return served.rounded(row)


def simulated(config, load, setting):
  """The same figures in virtual time, and what only the simulator knows."""
  slots = 1 << max(len(load), config.seats).bit_length()
  scheduler = dataclasses.replace(config.scheduler(slots), reserve=setting["reserve"])
  step_time = profile.step_time(
    config.traces_dir, STEM, config.layers, host_s=1e-3 * config.host_ms
  )
  params = sched.make_params(scheduler, budget=config.budget)
  result = sim.simulate(load, scheduler, params, step_time, overlap=setting["overlap"])
  once = int(load.num_prompt.sum()) + int(load.num_output.sum()) - len(load)
  times = measured(
    result.ttft_s, result.e2e_s, result.num_output, result.token_s[result.last_output].max()
  )
  return numbers(times) | {
    "steps": int(result.steps),
    "preemptions": int(result.preemptions),
    "computed_again": int(result.tokens) - once,
    "busy_s": round(float(result.busy_s), 3),
  }


def run(config, store):
  load, times = recorded(pathlib.Path(config.traces_dir) / f"{STEM}_vllm_requests.jsonl")
  fixed = dataclasses.asdict(config) | {"load": workload_digest(load)}
  folder = fixed.pop("traces_dir")
  fixed["profile"] = [
    digest(profile.path_of(folder, STEM, table).read_text("utf-8")) for table in profile.TABLES
  ]
  rows = store.measure(
    "Simulating the recorded run", fixed, VARIANTS, lambda s: simulated(config, load, s)
  )
  return [{"name": MEASURED} | numbers(times)] + [
    {"name": name(row)} | row | errors(row, numbers(times)) for row in rows
  ]


def name(row):
  words = "overlapped steps" if row["overlap"] else "no overlap"
  return f"{words}, admission {row['reserve']}"


def errors(row, truth):
  """Relative errors of the figures that must be within 10%, and of others."""
  keys = [key for key in truth if not key.startswith("curve")]
  return {f"error_{key}": round(row[key] / truth[key] - 1, 4) for key in keys}
