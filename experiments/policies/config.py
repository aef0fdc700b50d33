"""Which policies, on which loads, under which objectives."""

import dataclasses

from experiments.served import Server
from jaxserve import sched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """All policies on a load, at one rate and at the highest rate that keeps the objectives.

  Attributes:
    server: what serves.
    policies: names.
    budget: of policies that cut prompts to it; those that take whole prompts, and slo_aware, which
      bounds a step itself, get one that holds any prompt.
    traces: files of the loads; none: chats with a share of long prompts, generated.
    requests: of each load.
    rate: requests a second at which latencies are compared; None: a trace's own, 8 without one.
    ttft_slo_ms: objective for the first token.
    itl_slo_ms: objective for the longest gap.
    share: of the requests that must keep both.
    seed: of the generated load.
  """

  server: Server = Server(seats=128)
  policies: tuple[str, ...] = tuple(sched.POLICIES)
  budget: int = 1024
  traces: tuple[str, ...] = ()
  requests: int = 600
  rate: float | None = None
  ttft_slo_ms: float = 2000.0
  itl_slo_ms: float = 100.0
  share: float = 0.9
  seed: int = 0
