"""What is refused, and why: parameters and requests, checked on the host with clear errors."""

import logging
from collections.abc import Mapping

import jax
import numpy as np

from jaxserve.config import ModelConfig, SchedulerConfig
from jaxserve.pytree import scalar
from jaxserve.sched import policies
from jaxserve.types import SchedulerParams


def make_params(
  config: SchedulerConfig,
  *,
  budget: int | None = None,
  max_num_seqs: int | None = None,
  long_prefill_token_threshold: int = 0,
  cap_when_alone: bool = True,
  chunked_prefill: bool = True,
  watermark: float = 0.0,
  policy: Mapping[str, float] | None = None,
) -> SchedulerParams:
  """Validated scheduler parameters. To sweep them, replace a field by an array and vmap.

  Warns about an explicit budget that no step can use up.

  An unchunked budget below max_model_len is accepted here; a prompt longer than it is then refused
  by `check_request`.

  Args:
    config: what the numbers are checked against.
    budget: tokens a step; None: config.max_budget.
    max_num_seqs: seats in use; None: config.max_num_seqs.
    long_prefill_token_threshold: most tokens of one request a step; 0: no cap.
    cap_when_alone: the threshold also caps a request that has the server to itself.
    chunked_prefill: prompts may be split over steps.
    watermark: fraction of the pages that an admission leaves free while anything runs.
    policy: hyper-parameters of config.policy that differ from its defaults.

  Raises:
    ValueError: naming the field, its value and the remedy.
  """
  policies.check_drafts(config.policy, config.max_drafts)
  explicit = budget is not None
  budget = config.max_budget if budget is None else budget
  max_num_seqs = config.max_num_seqs if max_num_seqs is None else max_num_seqs
  checks = [
    (1 <= max_num_seqs <= config.max_num_seqs, "max_num_seqs", max_num_seqs,
     f"must be in [1, {config.max_num_seqs}]"),
    (budget >= max_num_seqs, "budget", budget,
     f"must be at least max_num_seqs={max_num_seqs}, one token for every decoding request: "
     f"raise the budget or lower max_num_seqs"),
    (budget <= config.max_budget, "budget", budget,
     f"must be at most max_budget={config.max_budget}, the largest bucket"),
    (0 <= long_prefill_token_threshold <= config.max_model_len,
     "long_prefill_token_threshold", long_prefill_token_threshold,
     f"must be in [0, max_model_len={config.max_model_len}]; 0 turns it off"),
    (0.0 <= watermark < 1.0, "watermark", watermark, "must be in [0, 1)"),
  ]  # fmt: skip
  for ok, field, value, remedy in checks:
    if not ok:
      raise ValueError(f"{field}={value}: {remedy}")
  if explicit and budget > max_num_seqs * config.max_model_len:
    logging.getLogger(__name__).warning(
      "budget=%d is more than max_num_seqs=%d requests of max_model_len=%d tokens can use",
      budget, max_num_seqs, config.max_model_len,
    )  # fmt: skip
  return SchedulerParams(
    budget=scalar(budget, np.int32),
    max_num_seqs=scalar(max_num_seqs, np.int32),
    long_prefill_token_threshold=scalar(long_prefill_token_threshold, np.int32),
    cap_when_alone=scalar(cap_when_alone, np.bool_),
    chunked_prefill=scalar(chunked_prefill, np.bool_),
    watermark_pages=scalar(int(watermark * config.cache.num_pages), np.int32),
    policy=_policy_params(config, policy or {}),
  )


def _policy_params(config: SchedulerConfig, given: Mapping[str, float]) -> dict[str, jax.Array]:
  policy = policies.find(config.policy)
  defaults = dict(policy.defaults)
  for name in given:
    if name not in defaults:
      known = ", ".join(defaults) or "none"
      raise ValueError(f"policy_args={name!r}: {config.policy} does not take it; it takes {known}")
  ranges = {name: (least, most) for name, least, most in policy.ranges}
  for name, value in given.items():
    if name in ranges:
      least, most = ranges[name]
      if not least <= value <= most:
        raise ValueError(f"policy_args={name}={value}: must be in [{least}, {most}]")
    elif not 0 < value < float("inf"):
      raise ValueError(f"policy_args={name}={value}: must be a positive number")
  return {name: scalar(value, np.float32) for name, value in (defaults | dict(given)).items()}


def chunking_allowed(model: ModelConfig, chunked_prefill: bool, threshold: int) -> tuple[bool, int]:
  """Whether prompts may be split, and at which threshold, for this model.

  Splitting is exact only for causal attention, so an encoder-decoder model turns chunking off and
  zeroes the threshold: that is not an error, but it is said.
  """
  if model.is_encoder_decoder and (chunked_prefill or threshold):
    logging.getLogger(__name__).warning(
      "encoder-decoder model: chunked prefill and prefix caching are off, "
      "long_prefill_token_threshold is 0 (attention over the prompt is not causal)"
    )
    return False, 0
  return chunked_prefill, threshold


def request_limit(config: SchedulerConfig, num_prompt: int, max_tokens: int | None) -> int:
  """Tokens, prompt and output, at which a request ends by length.

  Without max_tokens it may run to max_model_len, or to what the KV pool holds: the last token of a
  request is never fed, so a pool of n slots carries n + 1 tokens.
  """
  if max_tokens is None:
    return min(config.max_model_len, config.cache.num_slots + 1)
  return min(config.max_model_len, num_prompt + max_tokens)


def check_request(
  config: SchedulerConfig,
  params: SchedulerParams,
  num_prompt: int,
  max_tokens: int | None,
  min_tokens: int = 0,
) -> None:
  """Refuses a request that could never be served, with the numbers.

  Raises:
    ValueError: naming the field, its value and the remedy.
  """
  slots = config.cache.num_slots
  if num_prompt < 1:
    raise ValueError("prompt: is empty; send at least one token")
  if num_prompt >= config.max_model_len:
    raise ValueError(
      f"prompt: {num_prompt} tokens leave no room for an output within "
      f"max_model_len={config.max_model_len}; shorten it or raise max_model_len"
    )
  if max_tokens is not None and max_tokens < 1:
    raise ValueError(f"max_tokens={max_tokens}: must be at least 1")
  if not 0 <= min_tokens <= (max_tokens if max_tokens is not None else config.max_model_len):
    raise ValueError(f"min_tokens={min_tokens}: must be in [0, max_tokens={max_tokens}]")
  needed = request_limit(config, num_prompt, max_tokens) - 1
  if max(needed, num_prompt) > slots:
    raise ValueError(
      f"prompt: {num_prompt} tokens and max_tokens={max_tokens} need {max(needed, num_prompt)} KV "
      f"slots, the whole pool has {slots}; shorten the request or raise kv_cache_tokens"
    )
  policy = policies.find(config.policy)
  unchunked = not params.chunked_prefill or params.policy.get("chunked_prefill_size", 1) <= 0
  whole = policy.whole_prompts or unchunked
  if whole and num_prompt > params.budget:
    why = f"policy={config.policy}" if policy.whole_prompts else "chunked_prefill off"
    raise ValueError(
      f"prompt: {num_prompt} tokens exceed budget={params.budget} with {why}; "
      f"turn chunking on or raise the budget"
    )
  if policy.reserves_longest and config.pages_per_request > config.cache.num_pages:
    raise ValueError(
      f"policy={config.policy}: reserves {config.pages_per_request} pages a request "
      f"(max_model_len={config.max_model_len}), the pool has {config.cache.num_pages}; raise "
      f"kv_cache_tokens or lower max_model_len"
    )
