"""A closed loop: so many requests are under way, and the next is sent when one has finished.

A scheduler with as many slots as requests under way takes the next of a workload that is all there
at 0 s when a slot is free. That is the closed loop; only arrival times are put right afterwards.
"""

import numpy as np

from experiments import case, served
from jaxserve import cost_tables, sched, sim
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.cost import Hardware
from jaxserve.workload import Workload

KV_TOKENS, CHUNK, PROMPT, OUTPUT, PAGE = 371_587, 8192, 1024, 1024, 16
POLICIES = {"mixed": "vllm_v1", "prefill first": "sglang"}


def step_time(gpus):
  """Qwen3-32B in FP8 on H200s: twice the bfloat16 FLOP/s, the same shares of the data sheet."""
  one = cost_tables.find_device("h200").hardware
  hardware = Hardware(
    name=f"{gpus} H200", flops=2 * gpus * one.flops, bandwidth=gpus * one.bandwidth,
    spec_flops=2 * gpus * one.spec_flops, spec_bandwidth=gpus * one.spec_bandwidth,
  )  # fmt: skip
  return sim.roofline(case.model("qwen3-32b", bytes_per_param=1), hardware)


def measure(config, gpus, variant):
  """Mean TTFT and TPOT, p99 of all gaps and throughput of the closed loop."""
  many = config.concurrency
  scheduler = SchedulerConfig(
    cache=CacheConfig(num_pages=gpus * KV_TOKENS // PAGE, page_size=PAGE), max_num_seqs=many,
    max_requests=many, max_budget=CHUNK, max_model_len=PROMPT + OUTPUT, policy=POLICIES[variant],
  )  # fmt: skip
  load = Workload(
    arrival_s=np.zeros(config.closed_requests),
    num_prompt=np.full(config.closed_requests, PROMPT),
    num_output=np.full(config.closed_requests, OUTPUT),
  )
  params = sched.make_params(scheduler)
  result = sim.simulate(load, scheduler, params, step_time(gpus), overlap=False)
  sent = sent_s(result.e2e_s, many)
  return served.rounded({
    "ttft_ms": 1e3 * float(np.mean(result.ttft_s - sent)),
    "tpot_ms": 1e3 * float(np.nanmean(result.tpot_s)),
    "p99_itl_ms": 1e3 * float(np.percentile(result.itl_s(), 99)),
    "max_itl_ms": 1e3 * float(result.itl_s().max()),
    "output_throughput": float(result.num_output.sum() / result.token_s.max()),
  })  # fmt: skip


def sent_s(ends_s, many):
  """f64[n]: when each request is sent: the first `many` at 0, then one with every end."""
  return np.concatenate([np.zeros(min(many, len(ends_s))), np.sort(ends_s)])[: len(ends_s)]
