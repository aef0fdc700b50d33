"""Thresholds and budgets, on a load where long prompts crowd out short ones."""

import dataclasses

from experiments.served import Server


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A grid of thresholds and budgets.

  Attributes:
    server: what serves.
    budgets: token budgets.
    thresholds: most tokens of one request in a step; 0: no cap.
    requests: of the load.
    rate: requests a second.
    long_share: of the requests that have a long prompt.
    long_prompt: least and most tokens of those.
    seed: of the load.
  """

  server: Server = Server(seats=128, length=32_768)
  budgets: tuple[int, ...] = (1024, 2048)
  thresholds: tuple[int, ...] = (0, 128, 256, 512, 1024, 1536)
  requests: int = 1000
  rate: float = 8.0
  long_share: float = 0.05
  long_prompt: tuple[int, int] = (16_000, 30_000)
  seed: int = 0
