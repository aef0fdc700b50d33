"""One HTTP request while it is generated: its sequences, their text, and who waits for it."""

import asyncio
import dataclasses
from collections.abc import Callable

from jaxserve.engine.request import TokenEvent
from jaxserve.server.engine_thread import Submission
from jaxserve.server.errors import ApiError
from jaxserve.server.protocol import FinishReason
from jaxserve.text.detokenizer import make_detokenizer
from jaxserve.text.stop_strings import StopStrings
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tool_calls import Call, ToolCalls
from jaxserve.types import PromptOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
  """How tokens become text.

  Attributes:
    stops: strings that end it.
    include_stop: the string that ended it is part of it.
    skip_special_tokens: marks for the model are not.
    num_top: alternatives listed with every token; None: no log-probabilities.
    tools: tool calls are told apart from the text.
    one_call: the first of them ends it.
    no_outputs: the engine's one output is only there to have the prompt scored; drop it.
  """

  stops: tuple[str, ...] = ()
  include_stop: bool = False
  skip_special_tokens: bool = True
  num_top: int | None = None
  tools: bool = False
  one_call: bool = False
  no_outputs: bool = False


@dataclasses.dataclass(frozen=True)
class ScoredToken:
  """A generated token with its log-probability.

  `text` is what it added to the text: the pieces, joined, are the text, so a token that ends inside
  a character adds nothing and the one that completes it adds all of it.
  """

  token: int
  text: str
  logprob: float
  top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(kw_only=True)
class Piece:
  """What one sequence gained since the last one was taken; the first may score its prompt."""

  index: int
  text: str = ""
  calls: list[Call] = dataclasses.field(default_factory=list)
  tokens: list[int] = dataclasses.field(default_factory=list)
  scored: list[ScoredToken] = dataclasses.field(default_factory=list)
  finish_reason: FinishReason | None = None
  stop_reason: int | str | None = None
  prompt_scores: PromptOutput | None = None

  def add(self, other: "Piece") -> None:
    """Appends what came later."""
    self.prompt_scores = self.prompt_scores or other.prompt_scores
    self.text += other.text
    self.calls += other.calls
    self.tokens += other.tokens
    self.scored += other.scored
    self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason


class Choice:
  """One sequence."""

  def __init__(self, index: int, job: Submission, options: TextOptions, tokenizer: Tokenizer):
    self.index, self.job = index, job
    self.finish_reason: FinishReason | None = None
    self.num_tokens = self.cached_tokens = 0
    self.token_times_s: list[float] = []
    self.admitted_s: float | None = None
    self._tool_calls = ToolCalls() if options.tools else None
    self._called, self._one_call = False, options.one_call
    self._num_top, self._no_outputs = options.num_top, options.no_outputs
    self._eos = frozenset(tokenizer.eos_token_ids)
    self._stops = StopStrings(options.stops, include=options.include_stop)
    self._detokenizer = make_detokenizer(
      tokenizer, prompt_ids=job.prompt[-32:], skip_special_tokens=options.skip_special_tokens
    )

  def take(self, event: TokenEvent) -> Piece:
    """The next token of the engine; `finish_reason` may be set by a stop string."""
    if self._no_outputs:
      self.finish_reason = "length"
      return Piece(index=self.index, finish_reason="length", prompt_scores=event.prompt_scores)
    self.num_tokens += 1
    self.cached_tokens = event.cached_tokens
    text = self._detokenizer.push([event.token])
    ended = event.finish_reason is not None
    if ended:
      text += self._detokenizer.flush()
    piece = Piece(
      index=self.index, text=self._stops.push(text), tokens=[event.token],
      prompt_scores=event.prompt_scores,
    )  # fmt: skip
    if self._stops.matched is not None:
      piece.finish_reason, piece.stop_reason = "stop", self._stops.matched
    elif ended:
      piece.text += self._stops.flush()
      piece.finish_reason = event.finish_reason
      if event.finish_reason == "stop" and event.token not in self._eos:
        piece.stop_reason = event.token
    if self._num_top is not None:
      piece.scored.append(self._score(event, text))
    if self._tool_calls is not None:
      self._take_calls(self._tool_calls, piece)
    self.finish_reason = piece.finish_reason
    return piece

  def _take_calls(self, tool_calls: ToolCalls, piece: Piece) -> None:
    piece.text = tool_calls.push(piece.text)
    if piece.finish_reason is not None:
      piece.text += tool_calls.flush()
    piece.calls = tool_calls.take()
    self._called = self._called or bool(piece.calls)
    if self._called and (self._one_call or piece.finish_reason == "stop"):
      piece.finish_reason = "tool_calls"

  def _score(self, event: TokenEvent, text: str) -> ScoredToken:
    pairs = zip(event.top_ids, event.top_logits, strict=True)
    top = tuple((token, logit - event.log_sum) for token, logit in pairs)
    return ScoredToken(event.token, text, event.logprob, top[: self._num_top])


class Generation:
  """All sequences of one HTTP request. Lives on the event loop."""

  def __init__(
    self, choices: list[Choice], arrival_s: float, on_close: Callable[["Generation"], None]
  ):
    self.choices, self.arrival_s = choices, arrival_s
    self._on_close = on_close
    self._pieces: dict[int, Piece] = {}  # by choice; what nobody has taken yet
    self._error: ApiError | None = None
    self._news = asyncio.Event()
    self._timer: asyncio.TimerHandle | None = None

  @property
  def num_tokens(self) -> int:
    """Generated so far, by all sequences."""
    return sum(choice.num_tokens for choice in self.choices)

  @property
  def is_over(self) -> bool:
    """No sequence goes on."""
    return self._error is not None or all(c.finish_reason for c in self.choices)

  def give(self, piece: Piece) -> None:
    """Adds to what `next` returns."""
    if piece.index in self._pieces:
      self._pieces[piece.index].add(piece)
    else:
      self._pieces[piece.index] = piece
    self._news.set()

  def fail_after(self, seconds: float, error: ApiError) -> None:
    """Makes `next` raise unless this is closed in time."""
    self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, error)

  def fail(self, error: ApiError) -> None:
    """Makes `next` raise."""
    self._error = error
    self._news.set()

  async def next(self) -> list[Piece]:
    """Waits for news; everything since the last call, one piece a sequence.

    Raises:
      ApiError: the request failed; what came before is lost.
    """
    await self._news.wait()
    self._news.clear()
    if self._error is not None:
      raise self._error
    pieces, self._pieces = list(self._pieces.values()), {}
    return pieces

  def close(self) -> None:
    """Whoever asked has everything, or is gone; what still runs is aborted."""
    if self._timer is not None:
      self._timer.cancel()
    self._on_close(self)
