"""What a caller says of a request, and what the engine tells of it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from jaxserve.cache import PageChain
from jaxserve.engine.speculation import Restraint
from jaxserve.metrics import Acceptance
from jaxserve.types import PromptOutput, SchedulerParams
from jaxserve.types.sampling import FEW_TOP, MAX_BIAS, MAX_STOP_IDS, MAX_TOP

FinishReason = Literal["stop", "length", "abort", "error"]


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
    min_tokens: no stop token before so many outputs; the length still ends the request.
    presence_penalty: taken off the logits of tokens that the outputs have.
    frequency_penalty: the same, as often as they have them.
    repetition_penalty: makes tokens of prompt and outputs less likely above 1; 1: off.
    logit_bias: pairs of a token and what is added to its logit.
    allowed_token_ids: no others are drawn; None: off.
    bad_token_ids: never drawn.
    num_top: alternatives told with every output, the most likely ones.
    prompt_logprobs: the prompt's tokens are scored, with so many alternatives; None: they are not.
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
  min_tokens: int = 0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  repetition_penalty: float = 1.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  allowed_token_ids: tuple[int, ...] | None = None
  bad_token_ids: tuple[int, ...] = ()
  num_top: int = FEW_TOP
  prompt_logprobs: int | None = None

  def __post_init__(self) -> None:
    t = self.temperature
    _require(math.isfinite(t) and t >= 0, "temperature", t, "must be a number of at least 0")
    _require(self.top_k >= -1, "top_k", self.top_k, "must be at least 1, or 0 or -1 for off")
    _require(0 <= self.top_p <= 1, "top_p", self.top_p, "must be in [0, 1]")
    _require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be in [0, 1]")
    _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "must be at least 0")
    for name in ("presence_penalty", "frequency_penalty"):
      _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "must be in [-2, 2]")
    r = self.repetition_penalty
    _require(0 < r <= 1000, "repetition_penalty", r, "must be above 0 and at most 1000; 1 is off")
    count = len(self.logit_bias)
    _require(count <= MAX_BIAS, "logit_bias", f"{count} tokens", f"at most {MAX_BIAS} are taken")
    for _, bias in self.logit_bias:
      _require(-100 <= bias <= 100, "logit_bias", bias, "must be in [-100, 100]")
    allowed = self.allowed_token_ids
    _require(allowed is None or len(allowed) > 0, "allowed_token_ids", allowed, "allows nothing")
    _require(0 <= self.num_top <= MAX_TOP, "num_top", self.num_top, f"must be in [0, {MAX_TOP}]")
    wanted = self.prompt_logprobs
    _require(
      wanted is None or 0 <= wanted <= MAX_TOP, "prompt_logprobs", wanted,
      f"must be in [0, {MAX_TOP}]",
    )  # fmt: skip

  @property
  def edits_logits(self) -> bool:
    """Some option changes logits before a token is chosen."""
    return bool(
      self.min_tokens or self.presence_penalty or self.frequency_penalty or self.logit_bias
      or self.repetition_penalty != 1 or self.allowed_token_ids is not None or self.bad_token_ids
    )  # fmt: skip

  def check(self, vocab_size: int, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that end a request, if the vocabulary has all tokens that are named.

    Raises:
      ValueError: it has not, or min_tokens holds back more than it can, or everything.
    """
    check_token_ids(self.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids([token for token, _ in self.logit_bias], vocab_size, "logit_bias")
    check_token_ids(self.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    check_token_ids(self.bad_token_ids, vocab_size, "bad_token_ids")
    stops = tuple(
      dict.fromkeys((*(() if self.ignore_eos else eos_token_ids), *self.stop_token_ids))
    )
    if self.min_tokens:
      most = f"holds back at most {MAX_STOP_IDS} stop tokens"
      _require(len(stops) <= MAX_STOP_IDS, "min_tokens", self.min_tokens, most)
    allowed = range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
    barred = {*self.bad_token_ids, *(stops if self.min_tokens else ())}
    if len(barred) >= len(set(allowed)):
      field = "allowed_token_ids" if self.allowed_token_ids is not None else "bad_token_ids"
      _require(not barred.issuperset(allowed), field, "...", "nothing is left to be drawn")
    return stops


class Constraint(Protocol):
  """Decides, token by token, which may come next. Called on the engine's thread, never to raise."""

  def mask(self) -> np.ndarray:
    """u32[ceil(V / 32)], bit t % 32 of word t // 32 set where token t may come."""

  def accept(self, token: int) -> bool:
    """Takes an output; True if the request has to end with it."""


@dataclasses.dataclass(kw_only=True)
class Request:
  """An accepted request on the host. The engine alone changes it."""

  id: int
  slot: int
  prompt: tuple[int, ...]
  sampling: SamplingParams
  stop_ids: frozenset[int]
  constraint: Constraint | None = None
  prompt_scores: list[PromptOutput] = dataclasses.field(default_factory=list)
  speculates: bool = True
  restraint: Restraint | None = None
  outputs: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  chain: PageChain | None = None  # with a prefix cache
  cached_tokens: int = 0
  num_admissions: int = 0


class TokenEvent(NamedTuple):
  """One output token of one request. A tuple, as is `Scheduled`: every step makes one a row.

  Attributes:
    request_id: as returned by `Engine.submit`.
    token: its id.
    logprob: its log-probability under the unmodified logits.
    top_ids: the most likely tokens at that position.
    top_logits: their logits, falling.
    log_sum: what turns a logit of that position into a log-probability, by subtraction.
    finish_reason: None while the request goes on.
    prompt_scores: of the prompt's tokens but the first, with the first output of a request that
      asked for them.
    cached_tokens: of the request, found in the prefix cache when it was admitted first.
  """

  request_id: int
  token: int
  logprob: float
  top_ids: tuple[int, ...]
  top_logits: tuple[float, ...]
  log_sum: float = 0.0
  finish_reason: FinishReason | None = None
  prompt_scores: PromptOutput | None = None
  cached_tokens: int = 0


class Scheduled(NamedTuple):
  """What one step computed for one request: `tokens` from position `start` on.

  `new_pages` pages were handed to it for them. `admission` says whether it entered the running set
  in this step, and if for the first time; then `cached` of its `known` tokens of prompt and outputs
  were found in the prefix cache. The last `drafts` of the tokens were drafts, of which the model
  found the first `accepted` right.
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
  drafts: int = 0
  accepted: int = 0


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
    plan_s: how long the host took to schedule it and to lay it out.
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
  plan_s: float = 0.0

  @property
  def num_tokens(self) -> int:
    """Tokens computed, padding left out."""
    return sum(s.tokens for s in self.scheduled)

  @property
  def acceptance(self) -> Acceptance:
    """Drafts of this step, of the requests whose outputs counted."""
    ours = {event.request_id for event in self.outputs}
    return Acceptance.of(
      (part.drafts, part.accepted)
      for part in self.scheduled
      if part.request_id in ours and not part.is_prefill
    )

  @property
  def num_places(self) -> int:
    """Tokens that the head was asked for, padding left out: one a request and one a draft."""
    return sum(1 + s.drafts for s in self.scheduled)


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
