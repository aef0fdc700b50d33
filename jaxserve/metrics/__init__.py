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

__all__ = [
  "RequestTimes", "Slo", "Stall", "e2e_s", "goodput", "itl_s", "longest_stall", "meets", "span_s",
  "summarize", "tpot_s", "ttft_s",
]  # fmt: skip
