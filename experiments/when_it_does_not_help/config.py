"""Three loads, of which one gains from chunking."""

import dataclasses

from experiments.served import Server


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Chunked and unchunked at the same budget, and other budgets.

  Attributes:
    server: what serves.
    budgets: of the chunked runs.
    requests: of each load.
    short_rate: requests a second of the uniform short prompts.
    mixed_rate: requests a second of the load with long prompts.
    short_prompt: tokens of every prompt of that load; its outputs are as many.
    seed: of all loads.
  """

  server: Server = Server(seats=128)
  budgets: tuple[int, ...] = (512, 2048, 16_384)
  requests: int = 800
  short_rate: float = 30.0
  mixed_rate: float = 10.0
  short_prompt: int = 128
  seed: int = 0
