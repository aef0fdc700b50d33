"""Every deployment at every rate; every link at one."""

import dataclasses

import numpy as np

from experiments import served
from experiments.store import workload_digest
from jaxserve import metrics, sched, sim


def load_of(config):
  """(name, load at one request a second)."""
  if config.trace:
    name, load = served.from_trace(
      config.trace, requests=config.requests, length=config.server.length
    )
    return name, load.faster(1 / load.rate)
  load = served.mixed(
    requests=config.requests, rate=1.0, seed=config.seed, length=config.server.length
  )
  return "chats with 5% long prompts", load


def fleet_of(config, replicas, budget):
  scheduler = config.server.scheduler(budget=budget)
  return sim.Fleet(
    config=scheduler, params=sched.make_params(scheduler), step_time=config.server.step_time(),
    replicas=replicas, routing="least_loaded",
  )  # fmt: skip


def serve(config, load, prefill, link_gb_s):
  """(result, what was sent or None)."""
  if not prefill:
    return sim.serve(load, fleet_of(config, config.gpus, config.budget)).result, None
  link = sim.Link(
    bytes_per_token=config.server.kv_bytes_per_token(), bytes_per_s=1e9 * link_gb_s
  )  # fmt: skip
  split = sim.disaggregate(
    load, fleet_of(config, prefill, config.prefill_budget),
    fleet_of(config, config.gpus - prefill, config.budget), link,
  )  # fmt: skip
  return split.result, split.sent_s


def run(config, store):
  _, load = load_of(config)
  names = ("server", "gpus", "budget", "prefill_budget", "ttft_slo_ms", "pace_slo_ms",
           "gap_slo_ms")  # fmt: skip
  fixed = {name: dataclasses.asdict(config)[name] for name in names}
  fixed["load"] = workload_digest(load)
  settings = [
    {"part": "rate", "prefill": prefill, "rate": rate, "link_gb_s": config.link_gb_s}
    for prefill in config.prefill
    for rate in config.rates
  ]
  settings += [
    {"part": "link", "prefill": config.link_prefill, "rate": config.rates[0], "link_gb_s": link}
    for link in config.links_gb_s
  ]
  return store.measure(
    "Simulating deployments", fixed, settings, lambda s: measure(config, load, s)
  )


def measure(config, load, setting):
  load = load.faster(setting["rate"])
  result, sent = serve(config, load, setting["prefill"], setting["link_gb_s"])
  first = 1e-3 * config.ttft_slo_ms
  objectives = {
    "kept_pace": metrics.Slo(ttft_s=first, tpot_s=1e-3 * config.pace_slo_ms),
    "kept_gap": metrics.Slo(ttft_s=first, itl_s=1e-3 * config.gap_slo_ms),
  }
  kept = {name: sim.attainment(result, slo) for name, slo in objectives.items()}
  second = [times[1] - times[0] for times in
            (request.token_times_s for request in result.requests()) if len(times) > 1]  # fmt: skip
  extra = {
    "p99_second_gap_ms": 1e3 * float(np.percentile(second, 99)),
    "p50_sent_ms": None if sent is None else 1e3 * float(np.percentile(sent, 50)),
    "p99_sent_ms": None if sent is None else 1e3 * float(np.percentile(sent, 99)),
  }
  return served.numbers(result) | served.rounded(kept | extra)
