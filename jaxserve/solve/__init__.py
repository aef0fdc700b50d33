"""Which token budget keeps a target for the inter-token gap, and what decides it."""

from jaxserve.solve.explain import check_feasible, reason
from jaxserve.solve.solver import (
  BINDINGS,
  Case,
  Prediction,
  Solution,
  Terms,
  binding,
  predict,
  ridge_tokens,
  smallest_budget,
  solve,
  terms,
)

__all__ = [
  "BINDINGS",
  "Case",
  "Prediction",
  "Solution",
  "Terms",
  "binding",
  "check_feasible",
  "predict",
  "reason",
  "ridge_tokens",
  "smallest_budget",
  "solve",
  "terms",
]
