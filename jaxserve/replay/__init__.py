"""A workload on the engine, recorded as plain data, and the report drawn from it."""

from jaxserve.replay.records import (
  RequestTrace,
  RunRecord,
  StepRecord,
  StepRequest,
  run_result,
)
from jaxserve.replay.report import render_report

__all__ = [
  "RequestTrace", "RunRecord", "StepRecord", "StepRequest", "render_report", "run_result",
]  # fmt: skip
