"""What `budget_sweep` varies and what it holds."""

import dataclasses

from experiments.served import Server


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A sweep of budgets on one load.

  Attributes:
    server: what serves.
    budgets: token budgets.
    itl_slo_ms: objective for the gap between two tokens.
    ttft_slo_ms: objective for the first token.
    trace: file of the load; None: chats with a share of long prompts, generated.
    requests: of the load.
    rate: requests a second, without a trace.
    speed: factor on the rate of the trace.
    seed: of the generated load.
  """

  server: Server = Server(seats=128)
  budgets: tuple[int, ...] = (
    128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384,
  )  # fmt: skip
  itl_slo_ms: float = 60.0
  ttft_slo_ms: float = 2000.0
  trace: str | None = None
  requests: int = 1500
  rate: float = 14.0
  speed: float = 1.0
  seed: int = 0
