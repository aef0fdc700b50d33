"""vLLM configuration and request cases: what is accepted, refused, or warned about."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.vectors import vllm
from experiments.vectors.outcome import Differs, Unsupported, equal, known_fields
from jaxserve import sched
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.types import SchedulerParams

CASE = ("config", "request", "result", "why", "name", "source", "note")
CONFIG = (
  "budget", "max_num_seqs", "max_model_len", "threshold", "watermark", "chunking", "policy",
  "block_size", "num_blocks", "reserve_full_prompt", "max_num_scheduled_tokens",
)  # fmt: skip
REQUEST = ("prompt_len", "max_model_len", "max_tokens", "min_tokens")


class _Warnings(logging.Handler):
  def __init__(self) -> None:
    super().__init__(logging.WARNING)
    self.messages: list[str] = []

  def emit(self, record: logging.LogRecord) -> None:
    self.messages.append(record.getMessage())


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
  """Collects what jaxserve warns about."""
  handler, logger = _Warnings(), logging.getLogger("jaxserve")
  logger.addHandler(handler)
  propagate, logger.propagate = logger.propagate, False
  try:
    yield handler.messages
  finally:
    logger.removeHandler(handler)
    logger.propagate = propagate


def _make(c: Mapping[str, Any], explicit: bool) -> tuple[SchedulerConfig, SchedulerParams]:
  """What the case configures; only an explicit budget can be too large."""
  budget = c.get("max_num_scheduled_tokens", c["budget"])
  config = SchedulerConfig(
    cache=CacheConfig(num_pages=c["num_blocks"] - 1, page_size=c["block_size"]),
    max_num_seqs=c["max_num_seqs"],
    max_requests=max(c["max_num_seqs"], 1),
    max_budget=budget,
    max_model_len=c["max_model_len"],
    ordering=c["policy"],
    reserve="gate" if c["reserve_full_prompt"] else "none",
  )
  return config, sched.make_params(
    config,
    budget=budget if explicit else None,
    long_prefill_token_threshold=c["threshold"],
    chunked_prefill=c["chunking"],
    watermark=c["watermark"],
  )


def _compare(expected: str, error: str, warnings: list[str]) -> None:
  seen = "error" if error else "warning" if warnings else "ok"
  if expected not in ("ok", "error", "warning"):
    raise Unsupported(f"unknown result {expected}")
  detail = error or "; ".join(warnings)
  if seen != expected:
    raise Differs(f"result: expected {expected}, got {seen}" + (f" ({detail})" if detail else ""))


def run_config(case: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Compares whether a configuration is accepted.

  `max_num_scheduled_tokens`, where given, is the budget: jaxserve has one limit, not two.
  """
  known_fields(case, CASE, {}, "case")
  known_fields(case["config"], (*CONFIG, "asynch", "prefix_caching"), vllm.LACKING_CONFIG, "config")
  c = vllm.DEFAULTS | dict(defaults) | dict(case["config"])
  error = ""
  with _warnings() as warnings:
    try:
      _make(c, explicit=bool({"budget", "max_num_scheduled_tokens"} & set(case["config"])))
    except ValueError as refused:
      error = str(refused)
  if case["result"] == "error" and not error:
    if not c["chunking"] and c["budget"] < c["max_model_len"]:
      raise Unsupported(
        "deliberate: accepted; a prompt longer than an unchunked budget is refused at submit"
      )
  if "max_num_scheduled_tokens" in c and (case["result"] == "error") != bool(error):
    raise Unsupported("no max_num_scheduled_tokens beside the budget")
  _compare(case["result"], error, warnings)


def run_request(case: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Compares whether a request is accepted, in an otherwise default configuration."""
  known_fields(case, CASE, {}, "case")
  request = case["request"]
  known_fields(request, REQUEST, vllm.LACKING_REQUEST, "request")
  c = vllm.DEFAULTS | dict(defaults) | dict(case.get("config") or {})
  c["max_model_len"] = request.get("max_model_len", c["max_model_len"])
  config, params = _make(c, explicit=False)
  prompt = request.get("prompt_len", 10)
  max_tokens = request.get("max_tokens", vllm.DEFAULT_MAX_TOKENS)
  error = ""
  with _warnings() as warnings:
    try:
      sched.check_request(config, params, prompt, max_tokens, request.get("min_tokens", 0))
    except ValueError as refused:
      error = str(refused)
  _compare(case["result"], error, warnings)
  if not error and max_tokens is None:
    room = c["max_model_len"] - prompt
    equal("max_tokens", sched.request_limit(config, prompt, None) - prompt, room)
