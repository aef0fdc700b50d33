"""Loads, servers and objectives of the published experiments."""

import dataclasses

LENGTHS = {
  "chat": {"prompt": (1730, 0.93), "output": (415, 0.55), "length": 8_192},
  "arxiv": {"prompt": (7059, 0.476), "output": (208, 0.45), "length": 16_384},
}
"""Median and sigma of lognormal lengths that have the published median and 90th percentile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is varied and what is held.

  Attributes:
    seeds: loads of Table 4, over which its numbers are averaged.
    table_requests: of each of them.
    table_rates: requests a second by kind of load: where hybrid batches alone have about the
      published median TTFT. At the rates of the artifact's scripts, 1 and 0.5, a server with its
      iteration times is overloaded.
    table_budgets: of the variants that cut prompts: that of the paper, and that of two of the
      artifact's scripts.
    capacity_requests: of the load of a capacity search.
    capacity: whether to search capacities, the longest part.
    most_delay_s: a rate is accepted if the median scheduling delay is within this, and the 99th
      percentile of all gaps within the objective.
    closed_requests: of the closed loop of prefill-first against mixed.
    concurrency: of that closed loop.
    gpus: numbers of GPUs of that closed loop.
  """

  seeds: int = 6
  table_requests: int = 128
  table_rates: tuple[tuple[str, float], ...] = (("chat", 0.6), ("arxiv", 0.385))
  table_budgets: tuple[int, ...] = (1024, 512)
  capacity_requests: int = 400
  capacity: bool = True
  most_delay_s: float = 2.0
  closed_requests: int = 1280
  concurrency: int = 128
  gpus: tuple[int, ...] = (1, 2)
