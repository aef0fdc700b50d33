"""What most experiments simulate: a model on a device, a load, and the numbers they report."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import case
from jaxserve import cost, metrics, sim, workload
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.sim import SimResult, StepTime
from jaxserve.workload import Workload

LATENCIES = (
  ("TTFT p50 ms", "p50_ttft_ms", "{:,.0f}"),
  ("TTFT p99 ms", "p99_ttft_ms", "{:,.0f}"),
  ("ITL p50 ms", "p50_itl_ms", "{:.1f}"),
  ("ITL p99 ms", "p99_itl_ms", "{:.1f}"),
  ("ITL max ms", "max_itl_ms", "{:,.1f}"),
  ("worst gap p99 ms", "p99_worst_gap_ms", "{:,.1f}"),
  ("TPOT p50 ms", "p50_tpot_ms", "{:.1f}"),
)
RATES = (
  ("output tok/s", "output_throughput", "{:,.0f}"),
  ("good req/s", "request_goodput", "{:.2f}"),
  ("req/s", "request_throughput", "{:.2f}"),
  ("busy", "utilization", "{:.0%}"),
  ("preempted", "preemptions", "{}"),
  ("steps", "steps", "{:,}"),
)
COLUMNS = LATENCIES + RATES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
  """A model on one device, and the shape of its scheduler. Steps are not padded to buckets."""

  model: str = "llama3-8b"
  hardware: str = "h100"
  seats: int = 64
  length: int = 16_384
  kv_tokens: int = 400_000
  page: int = 16
  overhead_ms: float = 0.0

  def scheduler(
    self, policy: str = "vllm_v1", budget: int = 2048, **fields: Any
  ) -> SchedulerConfig:
    """Its scheduler, for budgets up to one."""
    return SchedulerConfig(
      cache=CacheConfig(num_pages=-(-self.kv_tokens // self.page), page_size=self.page),
      max_num_seqs=self.seats, max_requests=2 * self.seats, max_budget=budget,
      max_model_len=self.length, policy=policy, **fields,
    )  # fmt: skip

  def step_time(self) -> StepTime:
    """Its roofline."""
    return sim.roofline(
      case.model(self.model), case.device(self.hardware).hardware,
      overhead_s=1e-3 * self.overhead_ms,
    )  # fmt: skip

  def kv_bytes_per_token(self) -> float:
    """Bytes of one token's KV."""
    return cost.kv_bytes_per_token(case.model(self.model))

  def words(self) -> str:
    """One phrase for a report."""
    return (
      f"{self.model} on one {case.device(self.hardware).hardware.name} (roofline of jaxserve.cost, "
      f"no padding), {self.seats} seats, {self.kv_tokens:,} tokens of KV"
    )


def from_trace(
  path: str, *, requests: int, speed: float = 1.0, length: int = 16_384
) -> tuple[str, Workload]:  # fmt: skip
  """(name, the first requests of a trace that fit, at `speed` times its rate)."""
  load = workload.read(path).fitting(length).first(requests)
  return pathlib.Path(path).stem, load.faster(speed)


def mixed(
  *, requests: int, rate: float, seed: int = 0, long_share: float = 0.05,
  long_prompt: tuple[int, int] = (8_000, 15_000), length: int = 16_384,
) -> Workload:  # fmt: skip
  """Chats of some 400 tokens, Poisson arrivals, and among them a share of long prompts."""
  rng = np.random.default_rng(seed)
  prompts = workload.lognormal(rng, requests, median=400, sigma=0.8, low=16, high=4_000)
  long = rng.random(requests) < long_share
  prompts = np.where(long, rng.integers(*long_prompt, requests), prompts)
  outputs = workload.lognormal(rng, requests, median=160, sigma=0.6, low=8, high=800)
  arrivals = workload.poisson_arrivals(rng, requests, rate=rate)
  return Workload(arrival_s=arrivals, num_prompt=prompts, num_output=outputs).fitting(length)


def numbers(result: SimResult, slo: metrics.Slo | None = None) -> dict[str, Any]:
  """The numbers of `COLUMNS`, rounded for a record.

  p99_worst_gap_ms is over requests, of the longest gap of each: p99_itl_ms is over tokens, so a
  stall that every request meets once in a hundred tokens is not seen in it.
  """
  summary = dict(result.summary(slo))
  gaps = [float(metrics.itl_s(request).max(initial=0.0)) for request in result.requests()]
  summary["p99_worst_gap_ms"] = 1e3 * float(np.percentile(gaps, 99))
  return rounded({key: summary[key] for _, key, _ in COLUMNS if key in summary})


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
  """Floats to six digits."""
  return {
    key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()
  }
