"""Ways to use the same GPUs, the links between them, and loads."""

import dataclasses

from experiments.served import Server


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """All GPUs serve everything, or some prefill and the others decode.

  Attributes:
    server: what each GPU is.
    gpus: of every deployment.
    prefill: GPUs that prefill, one deployment each; 0: all serve everything, with chunks.
    budget: of a GPU that decodes.
    prefill_budget: of a GPU that only prefills: nobody waits for its steps.
    link_gb_s: out of each GPU that prefills, for the comparison.
    links_gb_s: other links, at the deployment `link_prefill` and the first rate.
    link_prefill: GPUs that prefill when links are compared.
    rates: requests a second, all GPUs together.
    ttft_slo_ms: objective for the first token.
    pace_slo_ms: objective for the mean gap of a request, its pace.
    gap_slo_ms: the other one, for its longest gap.
    trace: file of the load; None: chats with a share of long prompts, generated.
    requests: of the load.
    seed: of a generated load.
  """

  server: Server = Server(seats=128)
  gpus: int = 4
  prefill: tuple[int, ...] = (0, 1, 2, 3)
  budget: int = 1024
  prefill_budget: int = 8192
  link_gb_s: float = 50.0
  links_gb_s: tuple[float, ...] = (1.0, 3.0, 10.0, 50.0, 400.0)
  link_prefill: int = 2
  rates: tuple[float, ...] = (16.0, 32.0, 48.0, 64.0)
  ttft_slo_ms: float = 1000.0
  pace_slo_ms: float = 10.0
  gap_slo_ms: float = 100.0
  trace: str | None = None
  requests: int = 1000
  seed: int = 0
