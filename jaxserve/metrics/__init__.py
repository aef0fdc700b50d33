"""What users feel, computed from timestamps."""

from jaxserve.metrics.latency import (
  RequestTimes,
  Slo,
  Stall,
  e2e_s,
  goodput,
  itl_s,
  longest_stall,
  meets,
  span_s,
  summarize,
  tpot_s,
  ttft_s,
)
from jaxserve.metrics.speculation import Acceptance

__all__ = [
  "Acceptance", "RequestTimes", "Slo", "Stall", "e2e_s", "goodput", "itl_s", "longest_stall",
  "meets", "span_s", "summarize", "tpot_s", "ttft_s",
]  # fmt: skip
