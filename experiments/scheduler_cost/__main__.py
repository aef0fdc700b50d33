"""What one scheduling step costs on the host: `python -m experiments.scheduler_cost`.

256 running requests of 128 pages each by default, all decoding. Times `schedule` + `commit`, each
compiled once and called with donated state, as the engine does. Prints a table, then one JSON line.
"""

import json
import statistics
import time

import jax
import numpy as np
from absl import app, flags

from jaxserve import sched
from jaxserve.config import CacheConfig, PlanShape, SchedulerConfig

FLAGS = flags.FLAGS
_REQUESTS = flags.DEFINE_integer("requests", 256, "Running requests.", lower_bound=1)
_PAGES = flags.DEFINE_integer("pages", 128, "Pages a request may hold.", lower_bound=2)
_QUEUE = flags.DEFINE_integer("queue", 256, "Slots of the waiting queue.", lower_bound=0)
_STEPS = flags.DEFINE_integer("steps", 400, "Timed steps.", lower_bound=10)
_ORDERING = flags.DEFINE_enum("ordering", "fcfs", ["fcfs", "priority"], "Order of service.")


def make_config() -> SchedulerConfig:
  page_size = 64
  cache = CacheConfig(num_pages=_REQUESTS.value * _PAGES.value, page_size=page_size)
  return SchedulerConfig(
    cache=cache,
    max_num_seqs=_REQUESTS.value,
    max_requests=_REQUESTS.value + _QUEUE.value,
    max_budget=8192,
    max_model_len=_PAGES.value * page_size,
    ordering=_ORDERING.value,
  )


def decoding_state(config, schedule, commit, params):
  """Every seat taken by a request half way through its context."""
  state, submit = sched.init(config), jax.jit(sched.submit, donate_argnums=0)
  half = config.max_model_len // 2
  for _ in range(config.max_num_seqs):
    state, _ = submit(state, np.int32(half), np.int32(config.max_model_len))
  none = np.zeros(config.max_requests, bool)
  while True:
    state, decision = schedule(state, params)
    state, _ = commit(state, decision, none)
    if int(decision.num_tokens) == config.max_num_seqs:
      return state, none


def median_us(times):
  return statistics.median(times) * 1e6


def main(_):
  config = make_config()
  params = jax.device_put(sched.make_params(config))
  schedule = jax.jit(lambda s, p: sched.schedule(s, p, config), donate_argnums=0)
  commit = jax.jit(sched.commit, donate_argnums=0)
  shape = PlanShape.of(config, num_tokens=config.max_num_seqs)
  lay_out = jax.jit(lambda s, d: sched.lay_out(s, d, shape))
  state, none = decoding_state(config, schedule, commit, params)
  times = {"schedule": [], "commit": [], "schedule+commit": [], "lay_out": []}
  for _ in range(_STEPS.value):
    t0 = time.perf_counter()
    state, decision = jax.block_until_ready(schedule(state, params))
    t1 = time.perf_counter()
    jax.block_until_ready(lay_out(state, decision))
    t2 = time.perf_counter()
    state, finished = jax.block_until_ready(commit(state, decision, none))
    t3 = time.perf_counter()
    times["schedule"].append(t1 - t0)
    times["lay_out"].append(t2 - t1)
    times["commit"].append(t3 - t2)
    times["schedule+commit"].append(t1 - t0 + t3 - t2)
  result = {f"{name}_us": round(median_us(v), 1) for name, v in times.items()}
  result |= {"requests": _REQUESTS.value, "pages": _PAGES.value, "jax": jax.__version__}
  for name, value in result.items():
    print(f"{name:20} {value}")
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
