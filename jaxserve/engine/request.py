"""What a caller says of a request, and what the engine tells of it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from jaxserve.cache import PageChain
from jaxserve.types import SchedulerParams

FinishReason = Literal["stop", "length", "abort"]


def _require(ok: bool, field: str, value: object, remedy: str) -> None:
  if not ok:
    raise ValueError(f"{field}={value!r}: {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """How the outputs of a request are drawn, and when they end.

  Attributes:
    max_tokens: most outputs; None: until max_model_len.
    temperature: 0 is greedy.
    top_k: draw among the k most likely tokens; 0 or -1: off.
    top_p: draw among the fewest tokens whose probabilities reach top_p; 0: the most likely one.
    min_p: drop tokens less likely than min_p times the most likely one.
    seed: of this request; its text depends on nothing else. None: the engine picks one.
    stop_token_ids: tokens that end the request, besides end of sequence.
    ignore_eos: go on past end of sequence.
    cache_salt: shares cached pages only with requests of the same salt; None: with those of none.
    reads_prefix_cache: may use what others computed. Off, all of the prompt is computed, and others
      can still use it.
  """

  max_tokens: int | None = 16
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int | None = None
  stop_token_ids: tuple[int, ...] = ()
  ignore_eos: bool = False
  cache_salt: str | None = None
  reads_prefix_cache: bool = True

  def __post_init__(self) -> None:
    t = self.temperature
    _require(math.isfinite(t) and t >= 0, "temperature", t, "must be a number of at least 0")
    _require(self.top_k >= -1, "top_k", self.top_k, "must be at least 1, or 0 or -1 for off")
    _require(0 <= self.top_p <= 1, "top_p", self.top_p, "must be in [0, 1]")
    _require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be in [0, 1]")


@dataclasses.dataclass(kw_only=True)
class Request:
  """An accepted request on the host. The engine alone changes it."""

  id: int
  slot: int
  prompt: tuple[int, ...]
  sampling: SamplingParams
  stop_ids: frozenset[int]
  outputs: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  chain: PageChain | None = None  # with a prefix cache
  cached_tokens: int = 0
  num_admissions: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenEvent:
  """One output token of one request.

  Attributes:
    request_id: as returned by `Engine.submit`.
    token: its id.
    logprob: its log-probability under the unmodified logits.
    top_ids: the most likely tokens at that position.
    top_logits: their logits, falling.
    log_sum: what turns a logit of that position into a log-probability, by subtraction.
    finish_reason: None while the request goes on.
    cached_tokens: of the request, found in the prefix cache when it was admitted first.
  """

  request_id: int
  token: int
  logprob: float
  top_ids: tuple[int, ...]
  top_logits: tuple[float, ...]
  log_sum: float = 0.0
  finish_reason: FinishReason | None = None
  cached_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduled:
  """What one step computed for one request: `tokens` from position `start` on.

  `new_pages` pages were handed to it for them. `admission` says whether it entered the running set
  in this step, and if for the first time; then `cached` of its `known` tokens of prompt and outputs
  were found in the prefix cache.
  """

  request_id: int
  start: int
  tokens: int
  new_pages: int
  samples: bool
  is_prefill: bool
  admission: Literal["", "first", "again"] = ""
  cached: int = 0
  known: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepEvents:
  """One finished step: what was planned, when it ran, what came out.

  Attributes:
    step: number of the step since the engine was built.
    bucket: T, tokens it was padded to.
    budget: token budget it was scheduled under.
    scheduled: requests in order of service.
    admitted: request ids.
    preempted: request ids.
    dispatched_s: when it was handed to the device.
    done_s: when its outputs were on the host.
    outputs: tokens, in row order.
    evicted: pages whose cached content was lost to a request of this step.
  """

  step: int
  bucket: int
  budget: int
  scheduled: tuple[Scheduled, ...]
  admitted: tuple[int, ...]
  preempted: tuple[int, ...]
  dispatched_s: float
  done_s: float
  outputs: tuple[TokenEvent, ...]
  evicted: int = 0

  @property
  def num_tokens(self) -> int:
    """Tokens computed, padding left out."""
    return sum(s.tokens for s in self.scheduled)


class Listener(Protocol):
  """Who is told, in order, of everything that goes into an engine and comes out of it.

  Called on the engine's own thread; what is refused is not told.
  """

  def on_submit(
    self, request_id: int, prompt: tuple[int, ...], sampling: SamplingParams, priority: int
  ) -> None:
    """A request was accepted; its seed is never None."""

  def on_abort(self, request_id: int) -> None:
    """A request that had not finished was aborted."""

  def on_params(self, params: SchedulerParams) -> None:
    """From the next scheduled step on, these hold."""

  def on_step(self, events: StepEvents) -> None:
    """The outputs of a step were read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """A finished request of `Engine.generate`.

  `cached_tokens` of the prompt were found in the prefix cache when it was admitted.
  """

  prompt: tuple[int, ...]
  tokens: tuple[int, ...]
  logprobs: tuple[float, ...]
  finish_reason: FinishReason
  cached_tokens: int = 0


def check_token_ids(ids: Sequence[int], vocab_size: int, field: str = "prompt") -> None:
  """Refuses ids outside the vocabulary; JAX would clamp them silently."""
  for position, token in enumerate(ids):
    if not 0 <= token < vocab_size:
      raise ValueError(
        f"{field}[{position}]={token}: not a token id; the vocabulary has [0, {vocab_size})"
      )


def completion(request: Request, reason: FinishReason) -> Completion:
  """The request as its caller sees it when it is over."""
  return Completion(
    prompt=request.prompt,
    tokens=tuple(request.outputs),
    logprobs=tuple(request.logprobs),
    finish_reason=reason,
    cached_tokens=request.cached_tokens,
  )


Requests = Mapping[int, Request]
