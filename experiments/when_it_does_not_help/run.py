"""Each load under several budgets, and unchunked."""

import dataclasses

import jax
import numpy as np

from experiments import served
from experiments.store import workload_digest
from jaxserve import sched, sim, workload
from jaxserve.workload import Workload

UNIFORM, OFFLINE, MIXED = "uniform short prompts", "offline batch", "chats and long prompts"


def loads_of(config):
  rng, count = np.random.default_rng(config.seed), config.requests
  mixed = served.mixed(
    requests=count, rate=config.mixed_rate, seed=config.seed, length=config.server.length
  )
  uniform = Workload(
    arrival_s=workload.poisson_arrivals(rng, count, rate=config.short_rate),
    num_prompt=workload.fixed(count, config.short_prompt),
    num_output=workload.fixed(count, config.short_prompt),
  )
  offline = dataclasses.replace(mixed, arrival_s=np.zeros(len(mixed)))
  return {UNIFORM: uniform, OFFLINE: offline, MIXED: mixed}


def run(config, store):
  rows = []
  largest = config.server.length
  scheduler = config.server.scheduler(budget=max(largest, *config.budgets))
  for name, load in loads_of(config).items():
    fixed = {"server": dataclasses.asdict(config.server), "load": workload_digest(load)}
    settings = [{"load": name, "budget": budget, "chunked": True} for budget in config.budgets] + [
      {"load": name, "budget": largest, "chunked": False}
    ]

    def simulate(some, load=load):
      made = [
        sched.make_params(scheduler, budget=one["budget"], chunked_prefill=one["chunked"])
        for one in some
      ]
      batch = jax.tree.map(lambda *leaves: np.stack(leaves), *made)
      result = sim.sweep(load, scheduler, batch, config.server.step_time())
      return [numbers(result.lane(lane)) for lane in range(len(some))]

    rows += store.measure_many(f"Simulating {name}", fixed, settings, simulate)
  return rows


def numbers(result):
  end = float(result.token_s[: int(result.num_output.sum())].max())
  return served.numbers(result) | served.rounded({"makespan_s": end})
