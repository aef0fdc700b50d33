"""Every policy on every load: latencies at one rate, and the capacity within objectives."""

import dataclasses

from experiments import case, served
from experiments.store import workload_digest
from jaxserve import cost, metrics, sched, sim


def loads_of(config):
  """Name to workload."""
  length = config.server.length
  if not config.traces:
    load = served.mixed(
      requests=config.requests, rate=config.rate or 8.0, seed=config.seed, length=length
    )
    return {"chats with 5% long prompts": load}
  loads = {}
  for path in config.traces:
    name, load = served.from_trace(path, requests=config.requests, length=length)
    loads[name] = load.faster(config.rate / load.rate) if config.rate else load
  return loads


def slo_of(config):
  return metrics.Slo(ttft_s=1e-3 * config.ttft_slo_ms, itl_s=1e-3 * config.itl_slo_ms)


def server_of(config, policy):
  """(scheduler, parameters) of a policy; hyper-parameters that depend on the model are set."""
  whole = sched.find_policy(policy).whole_prompts or policy == "slo_aware"
  budget = config.server.length if whole else config.budget
  scheduler = config.server.scheduler(policy, budget)
  extra = {}
  if policy == "slo_aware":
    device = case.device(config.server.hardware).hardware
    extra = {"itl_target_ms": 0.9 * config.itl_slo_ms} | cost.step_terms(
      case.model(config.server.model), device
    )
  return scheduler, sched.make_params(scheduler, policy=extra)


def run(config, store):
  slo, rows = slo_of(config), []
  for name, load in loads_of(config).items():
    fixed = {
      "server": dataclasses.asdict(config.server), "load": workload_digest(load),
      "slo": dataclasses.asdict(slo), "share": config.share, "budget": config.budget,
    }  # fmt: skip
    settings = [{"load": name, "policy": policy} for policy in config.policies]
    rows += store.measure(
      f"Simulating policies on {name}", fixed, settings,
      lambda setting, load=load: measure(config, load, slo, setting["policy"]),
    )  # fmt: skip
  return rows


def measure(config, load, slo, policy):
  scheduler, params = server_of(config, policy)
  step_time = config.server.step_time()
  result = sim.simulate(load, scheduler, params, step_time)
  found = sim.capacity(
    load, scheduler, params, step_time, slo=slo, share=config.share, tolerance=0.05
  )
  return served.numbers(result, slo) | served.rounded({
    "kept": sim.attainment(result, slo), "capacity_per_s": found.rate,
    "budget": scheduler.max_budget,
  })  # fmt: skip
