"""A workload in virtual time under several budgets: `python -m experiments.simulate`.

  python -m experiments.simulate --trace FILE --seconds 600 --budget 512,1024,2048
  python -m experiments.simulate --rate 4 --requests 1000 --prompt 512 --output 128 --spread 0.8

Prints a table, one line a configuration, then one JSON line; --record appends it to results/. All
budgets and thresholds of a policy run as one program.
"""

import dataclasses
import json
import sys
import time

import numpy as np
from absl import app, flags, logging

from experiments import case, provenance
from experiments.simulate import table
from jaxserve import metrics, sched, sim, workload
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.engine.config import token_buckets
from jaxserve.progress import progress

FLAGS = flags.FLAGS

_TRACE = flags.DEFINE_string("trace", None, "Trace: Azure CSV, Mooncake or LLMServingSim JSONL.")
_SECONDS = flags.DEFINE_float("seconds", None, "Only requests that arrive so early in the trace.")
_REQUESTS = flags.DEFINE_integer("requests", None, "Only so many requests; 1000 without a trace.")
_SPEED = flags.DEFINE_float("speed", 1.0, "Factor on the rate of arrivals.", lower_bound=1e-6)
_RATE = flags.DEFINE_float("rate", 4.0, "Requests a second, without a trace.", lower_bound=1e-6)
_CV = flags.DEFINE_float("cv", 1.0, "Variation of the gaps between arrivals; 1: Poisson.")
_PROMPT = flags.DEFINE_integer("prompt", 512, "Median prompt, without a trace.", lower_bound=1)
_OUTPUT = flags.DEFINE_integer("output", 128, "Median outputs, without a trace.", lower_bound=1)
_SPREAD = flags.DEFINE_float("spread", 0.0, "Sigma of the lognormal lengths; 0: all the median.")
_SEED = flags.DEFINE_integer("seed", 0, "Of arrivals and lengths.")

_MODEL = flags.DEFINE_string("model", "llama3-8b", "A name of the table, or a config.json's path.")
_DEVICE = flags.DEFINE_string("hardware", "h100", "h100, h200, a100, l40s, b200, or this.")
_PROFILE = flags.DEFINE_string(
  "profile", None, "Measured costs of experiments.calibrate, in the place of model and hardware."
)
_OVERHEAD = flags.DEFINE_float("overhead_ms", 0.0, "Time of every step besides.", lower_bound=0.0)
_OVERLAP = flags.DEFINE_bool("overlap", True, "Decide a step before the last one's outputs.")
_BUCKETS = flags.DEFINE_bool("buckets", True, "Pad steps to the engine's token buckets.")

_BUDGET = flags.DEFINE_list("budget", ["512", "1024", "2048"], "Token budgets.")
_THRESHOLD = flags.DEFINE_list("long_prefill_token_threshold", ["0"], "Caps; 0: none.")
_POLICIES = flags.DEFINE_list("policy", ["vllm_v1"], "Scheduling policies.")
_SEATS = flags.DEFINE_integer("max_num_seqs", 64, "Requests running at once.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("max_requests", None, "Running and waiting; twice the seats.")
_LENGTH = flags.DEFINE_integer("max_model_len", 16384, "Most tokens of a request.", lower_bound=2)
_KV = flags.DEFINE_integer("kv_cache_tokens", 400_000, "Tokens in the KV pool.", lower_bound=1)
_PAGE = flags.DEFINE_integer("page_size", 16, "Tokens of a page.", lower_bound=1)
_TTFT = flags.DEFINE_float("slo_ttft_ms", 1000.0, "Objective of goodput.")
_ITL = flags.DEFINE_float("slo_itl_ms", 100.0, "Objective of goodput, for the longest gap.")
_CAPACITY = flags.DEFINE_bool("capacity", False, "Also search the rate that 99% still meet.")
_RECORD = flags.DEFINE_bool("record", False, "Append the result to results/.")


def read_workload():
  """The requests that fit, and how many do not."""
  if _TRACE.value:
    load = workload.read(_TRACE.value)
    load = load if _SECONDS.value is None else load.until(_SECONDS.value)
    load = load if _REQUESTS.value is None else load.first(_REQUESTS.value)
  else:
    load = generated(np.random.default_rng(_SEED.value), _REQUESTS.value or 1000)
    load = load if _SECONDS.value is None else load.until(_SECONDS.value)
  fitting = load.fitting(_LENGTH.value).faster(_SPEED.value)
  if len(fitting) < len(load):
    logging.warning(
      "%d of %d requests left out: longer than max_model_len=%d",
      len(load) - len(fitting), len(load), _LENGTH.value,
    )  # fmt: skip
  return fitting


def generated(rng, count):
  def lengths(median):
    if _SPREAD.value <= 0:
      return workload.fixed(count, median)
    return workload.lognormal(
      rng, count, median=median, sigma=_SPREAD.value, high=_LENGTH.value // 2
    )

  return workload.Workload(
    arrival_s=workload.gamma_arrivals(rng, count, rate=_RATE.value, cv=_CV.value),
    num_prompt=lengths(_PROMPT.value),
    num_output=lengths(_OUTPUT.value),
  )


def make_config(policy, budgets):
  return SchedulerConfig(
    cache=CacheConfig(num_pages=-(-_KV.value // _PAGE.value), page_size=_PAGE.value),
    max_num_seqs=_SEATS.value,
    max_requests=_SLOTS.value or 2 * _SEATS.value,
    max_budget=max(budgets),
    max_model_len=_LENGTH.value,
    policy=policy,
  )


@dataclasses.dataclass
class Watch:
  """Wall time of the simulation alone, without the compilation before it."""

  bar: object
  begin_s: float = 0.0
  seen: int = 0

  def __call__(self, submitted):
    if not submitted:
      self.begin_s = time.perf_counter()
    self.bar.advance(submitted - self.seen)
    self.seen = submitted


def make_step_time():
  """By the profile if there is one, else by the roofline."""
  if profile := case.profile(_PROFILE.value):
    return sim.profiled(profile)
  hardware = case.device(_DEVICE.value).hardware
  return sim.roofline(case.model(_MODEL.value), hardware, overhead_s=1e-3 * _OVERHEAD.value)


def served():
  """On what, in words."""
  profile = case.profile(_PROFILE.value)
  if profile is None:
    return f"{_MODEL.value} on one {_DEVICE.value}"
  return f"{profile.model} on {profile.device}, as measured"


def run_policy(policy, load, slo):
  """One row of results for every budget and threshold."""
  budgets, thresholds = ([int(x) for x in flag.value] for flag in (_BUDGET, _THRESHOLD))
  config = make_config(policy, budgets)
  step_time = make_step_time()
  buckets = token_buckets(*budgets) if _BUCKETS.value else ()
  options = {"overlap": _OVERLAP.value, "buckets": buckets}
  batch, settings = sim.grid(config, budget=budgets, long_prefill_token_threshold=thresholds)
  with progress(len(load) * len(settings), "requests", f"Simulating {policy}") as bar:
    watch = Watch(bar)
    result = sim.sweep(load, config, batch, step_time, on_progress=watch, **options)
    seconds = time.perf_counter() - watch.begin_s
  rows = [
    {"policy": policy} | setting | dict(result.lane(lane).summary(slo))
    for lane, setting in enumerate(settings)
  ]
  if _CAPACITY.value:
    for row, setting in zip(rows, settings, strict=True):
      params = sched.make_params(config, **setting)
      found = sim.capacity(load, config, params, step_time, slo=slo, **options)
      row["capacity_per_s"] = round(found.rate, 3)
  speed = float(result.steps.sum()) / seconds
  return rows, {"policy": policy, "simulated_steps_per_s": round(speed), "seconds": seconds}


def main(argv):
  try:
    case.no_arguments(argv)
    simulate_all()
  except (ValueError, OSError) as error:
    print(f"experiments.simulate: {error}", file=sys.stderr)
    return 2
  return 0


def simulate_all():
  logging.set_verbosity(logging.INFO)
  load = read_workload()
  slo = metrics.Slo(ttft_s=1e-3 * _TTFT.value, itl_s=1e-3 * _ITL.value)
  rows, speeds = [], []
  for policy in _POLICIES.value:
    found, speed = run_policy(policy, load, slo)
    rows, speeds = rows + found, [*speeds, speed]
  print(
    f"{len(load)} requests in {load.span_s:.0f} s, {load.num_prompt.sum():,} prompt and "
    f"{load.num_output.sum():,} output tokens; {served()}, "
    f"{_SEATS.value} seats"
  )
  print(table.render(rows))
  for speed in speeds:
    print(
      f"{speed['policy']}: {speed['simulated_steps_per_s']:,} simulated steps/s on this machine"
    )
  result = {"requests": len(load), "seats": _SEATS.value, "lanes": len(rows), "speed": speeds}
  result |= {"results": [table.rounded(row) for row in rows]} | provenance.collect()
  if _RECORD.value:
    provenance.append(__file__, result)
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("simulate", FLAGS, flags.Error))
