"""All thresholds and budgets are lanes of one simulation."""

import dataclasses

import jax
import numpy as np

from experiments import served
from experiments.store import workload_digest
from jaxserve import sched, sim


def load_of(config):
  return served.mixed(
    requests=config.requests, rate=config.rate, seed=config.seed, long_share=config.long_share,
    long_prompt=config.long_prompt, length=config.server.length,
  )  # fmt: skip


def run(config, store):
  load = load_of(config)
  scheduler = config.server.scheduler(budget=max(config.budgets))
  settings = [
    {"budget": budget, "long_prefill_token_threshold": threshold}
    for budget in config.budgets
    for threshold in config.thresholds
    if threshold < budget
  ]
  fixed = {"server": dataclasses.asdict(config.server), "load": workload_digest(load)}
  long = load.num_prompt >= config.long_prompt[0]

  def simulate(some):
    made = [sched.make_params(scheduler, **one) for one in some]
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *made)
    result = sim.sweep(load, scheduler, batch, config.server.step_time())
    return [numbers(result.lane(lane), long) for lane in range(len(some))]

  return store.measure_many("Simulating thresholds", fixed, settings, simulate)


def numbers(result, long):
  ms = 1e3 * result.ttft_s
  return served.numbers(result) | served.rounded({
    "short_p50_ttft_ms": float(np.percentile(ms[~long], 50)),
    "short_p99_ttft_ms": float(np.percentile(ms[~long], 99)),
    "long_p50_ttft_ms": float(np.percentile(ms[long], 50)),
    "long_p99_ttft_ms": float(np.percentile(ms[long], 99)),
  })  # fmt: skip
