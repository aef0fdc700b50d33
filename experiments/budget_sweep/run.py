"""One program: all budgets are lanes of one simulation."""

import dataclasses

from experiments import case, served
from experiments.store import workload_digest
from jaxserve import metrics, sim, solve


def load_of(config):
  if config.trace:
    return served.from_trace(
      config.trace, requests=config.requests, speed=config.speed, length=config.server.length
    )
  load = served.mixed(
    requests=config.requests, rate=config.rate, seed=config.seed, length=config.server.length
  )
  return "chats with 5% long prompts", load


def run(config, store):
  name, load = load_of(config)
  slo = metrics.Slo(ttft_s=1e-3 * config.ttft_slo_ms, itl_s=1e-3 * config.itl_slo_ms)
  fixed = {
    "server": dataclasses.asdict(config.server), "load": workload_digest(load),
    "slo": dataclasses.asdict(slo),
  }  # fmt: skip
  scheduler = config.server.scheduler(budget=max(config.budgets))

  def simulate(settings):
    batch, _ = sim.grid(scheduler, budget=[setting["budget"] for setting in settings])
    result = sim.sweep(load, scheduler, batch, config.server.step_time())
    return [served.numbers(result.lane(lane), slo) for lane in range(len(settings))]

  settings = [{"load": name, "budget": budget} for budget in config.budgets]
  return store.measure_many("Simulating budgets", fixed, settings, simulate)


def solved(config, load):
  """The solver's budget for the same target: 32 decoders at the load's mean context."""
  context = int(load.num_prompt.mean() + load.num_output.mean() / 2)
  question = solve.Case(
    itl=1e-3 * config.itl_slo_ms, decoders=32, context=context,
    max_prefix=int(load.num_prompt.max()), page_size=64,
  )  # fmt: skip
  model, device = case.model(config.server.model), case.device(config.server.hardware)
  return solve.solve(model, device.hardware, question)
