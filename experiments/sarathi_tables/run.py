"""The three published comparisons in virtual time."""

import dataclasses

import numpy as np

from experiments import case, served
from experiments.sarathi_tables import closed_loop, published
from experiments.sarathi_tables.config import LENGTHS
from jaxserve import sched, sim, workload
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.workload import Workload

SEATS, PAGE = 128, 16
VARIANTS = {"hybrid only": ("sarathi", False), "chunking only": ("simple_chunking", True),
            "both": ("sarathi", True)}  # fmt: skip
SYSTEMS = {"orca": "orca", "vllm": "prefill_first", "sarathi": "sarathi"}
MODELS = {
  # KV tokens that 0.9 of the memory hold beside the weights; objectives for p99 TBT, s.
  "mistral": {"kv_tokens": 430_000, "strict": 0.1, "relaxed": 0.5},
  "yi": {"kv_tokens": 306_000, "strict": 0.2, "relaxed": 1.0},
}
CHUNKS = {"strict": 512, "relaxed": 2048}


def load_of(kind, requests, rate, seed):
  """Lognormal lengths, Poisson arrivals, cut to the longest request the server takes."""
  rng, lengths = np.random.default_rng(seed), LENGTHS[kind]
  most = lengths["length"]

  def draw(name, high):
    median, sigma = lengths[name]
    return workload.lognormal(rng, requests, median=median, sigma=sigma, low=16, high=high)

  prompts, outputs = draw("prompt", most - 1_024), draw("output", 1_024)
  arrivals = workload.poisson_arrivals(rng, requests, rate=rate)
  return Workload(arrival_s=arrivals, num_prompt=prompts, num_output=outputs)


def scheduler_of(policy, kind, budget, kv_tokens, seats=SEATS):
  return SchedulerConfig(
    cache=CacheConfig(num_pages=kv_tokens // PAGE, page_size=PAGE), max_num_seqs=seats,
    max_requests=2 * seats, max_budget=budget, max_model_len=LENGTHS[kind]["length"],
    policy=policy,
  )  # fmt: skip


def step_time_of(model):
  if model == "yi":
    return published.yi_34b()
  return sim.roofline(case.model("mistral-7b"), case.device("a100").hardware)


def run(config, store):
  table = [
    {"part": "table 4", "load": kind, "variant": variant, "rate": rate, "budget": budget}
    for kind, rate in config.table_rates
    for variant, (_, chunked) in VARIANTS.items()
    for budget in (config.table_budgets if chunked else (LENGTHS[kind]["length"],))
  ]
  fixed = {key: value for key, value in dataclasses.asdict(config).items() if key != "capacity"}
  fixed["published"] = [published.BASE_MS, published.TOKEN_MS, published.PAIR_MS,
                        published.LEAST_MS, published.ROW_MS]  # fmt: skip
  rows = store.measure("Table 4", fixed, table, lambda s: table_row(config, s))
  closed = [
    {"part": "mixed", "gpus": gpus, "variant": variant}
    for gpus in config.gpus
    for variant in ("mixed", "prefill first")
  ]
  rows += store.measure(
    "Closed loop", fixed, closed, lambda s: closed_loop.measure(config, s["gpus"], s["variant"])
  )
  if config.capacity:
    searches = [
      {"part": "capacity", "model": model, "load": kind, "slo": slo, "variant": system}
      for model in MODELS
      for kind in LENGTHS
      for slo in CHUNKS
      for system in SYSTEMS
    ]
    rows += store.measure("Capacity", fixed, searches, lambda s: capacity_row(config, s))
  return rows


def table_row(config, setting):
  """Means over the seeds of the median TTFT and of p99 TBT, all seeds in one program."""
  policy, chunked = VARIANTS[setting["variant"]]
  kind, budget = setting["load"], setting["budget"]
  scheduler = scheduler_of(policy, kind, budget, MODELS["yi"]["kv_tokens"])
  loads = [
    load_of(kind, config.table_requests, setting["rate"], seed) for seed in range(config.seeds)
  ]
  batch, _ = sim.grid(scheduler, budget=[budget], chunked_prefill=[chunked])
  result = sim.sweep(loads, scheduler, batch, published.yi_34b(), overlap=False)
  lanes = [result.lane(seed, 0) for seed in range(config.seeds)]
  ttft = [float(np.percentile(lane.ttft_s, 50)) for lane in lanes]
  tbt = [float(np.percentile(lane.itl_s(), 99)) for lane in lanes]
  return served.rounded({
    "p50_ttft_s": float(np.mean(ttft)), "p99_tbt_s": float(np.mean(tbt)),
    "ttft_spread_s": float(np.std(ttft)), "tbt_spread_s": float(np.std(tbt)),
    "published_ttft_s": published.TABLE_4.get((kind, setting["variant"]), {}).get("p50_ttft_s"),
    "published_tbt_s": published.TABLE_4.get((kind, setting["variant"]), {}).get("p99_tbt_s"),
  })  # fmt: skip


def capacity_row(config, setting):
  """By the criterion of the artifact: median scheduling delay and p99 of all gaps."""
  model, kind, system = MODELS[setting["model"]], setting["load"], setting["variant"]
  limit = model[setting["slo"]]
  length = LENGTHS[kind]["length"]
  budget = CHUNKS[setting["slo"]] if system == "sarathi" else length
  seats = 16 if system == "orca" else SEATS
  scheduler = scheduler_of(SYSTEMS[system], kind, budget, model["kv_tokens"], seats)
  params, step_time = sched.make_params(scheduler, budget=budget), step_time_of(setting["model"])
  load = load_of(kind, config.capacity_requests, 1.0, 0)

  def accepts(result):
    delay = float(np.median(result.scheduling_delay_s))
    return delay <= config.most_delay_s and float(np.percentile(result.itl_s(), 99)) <= limit

  found = sim.highest_rate(
    load,
    lambda part: sim.simulate(part, scheduler, params, step_time, overlap=False),
    accepts, tolerance=0.05,
  )  # fmt: skip
  return served.rounded({"budget": budget, "slo_s": limit, "capacity_per_s": found.rate})
