"""Workloads: when requests arrive and how long they are, generated or read from traces.

  rng = np.random.default_rng(0)
  load = workload.Workload(
    arrival_s=workload.poisson_arrivals(rng, 1000, rate=4.0),
    num_prompt=workload.lognormal(rng, 1000, median=512, sigma=1.0, high=8000),
    num_output=workload.fixed(1000, 128),
  )
  load = workload.read("trace.csv").until(600.0).faster(2.0)

Readers and generators are pure: files and numpy Generators are passed in.
"""

from jaxserve.workload.generate import (
  fixed,
  gamma_arrivals,
  histogram,
  lognormal,
  poisson_arrivals,
  uniform,
)
from jaxserve.workload.record import Workload
from jaxserve.workload.traces import (
  TraceError,
  read,
  read_azure,
  read_llmservingsim,
  read_mooncake,
)

__all__ = [
  "TraceError", "Workload", "fixed", "gamma_arrivals", "histogram", "lognormal",
  "poisson_arrivals", "read", "read_azure", "read_llmservingsim", "read_mooncake",
  "uniform",
]  # fmt: skip
