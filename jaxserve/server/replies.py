"""From pieces of generated text to the bytes of an answer, at once or as a stream of events."""

import dataclasses
import itertools
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from jaxserve.server.errors import ApiError
from jaxserve.server.generation import Generation, Piece, ScoredToken
from jaxserve.server.intake import Order
from jaxserve.server.protocol import (
  CalledFunction,
  ChatChoice,
  ChatChunk,
  ChatChunkChoice,
  ChatLogprobs,
  ChatReply,
  CompletionChoice,
  CompletionLogprobs,
  CompletionReply,
  Delta,
  PromptLogprob,
  PromptLogprobs,
  PromptTokensDetails,
  ReplyMessage,
  TokenLogprob,
  ToolCall,
  TopLogprob,
  Usage,
  encode,
)
from jaxserve.text.detokenizer import make_detokenizer
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tool_calls import Call
from jaxserve.types import PromptOutput

DONE = b"data: [DONE]\n\n"
_UsageField = Usage | None | UnsetType


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
  """What every part of an answer repeats."""

  id: str
  created: int
  model: str


class Format(Protocol):
  """How one kind of completion is written."""

  def whole(self, pieces: Sequence[Piece], usage: Usage) -> Struct:
    """The answer at once."""

  def chunks(self, piece: Piece, usage: _UsageField) -> Iterator[Struct]:
    """A piece of a stream."""

  def last(self, usage: Usage) -> Struct:
    """The chunk that has nothing but the usage."""


class TextFormat:
  """Completions of a text."""

  def __init__(self, header: Header, order: Order, tokenizer: Tokenizer):
    self._header, self._order, self._tokenizer = header, order, tokenizer
    self._scores = order.options.num_top is not None
    self._offsets = [0 if order.echo_scores else len(echo) for echo in order.echoes]
    self._begun: set[int] = set()

  def whole(self, pieces: Sequence[Piece], usage: Usage) -> Struct:
    """The answer at once."""
    return self._reply([self._choice(piece) for piece in pieces], usage)

  def chunks(self, piece: Piece, usage: _UsageField) -> Iterator[Struct]:
    """A piece of a stream."""
    choice = self._choice(piece)
    every = self._scores or self._order.return_ids or isinstance(usage, Usage)
    if choice.text or choice.finish_reason or every:
      yield self._reply([choice], usage)

  def last(self, usage: Usage) -> Struct:
    """The chunk that has nothing but the usage."""
    return self._reply([], usage)

  def _reply(self, choices: list[CompletionChoice], usage: _UsageField) -> CompletionReply:
    header = self._header
    return CompletionReply(
      id=header.id, created=header.created, model=header.model, choices=choices, usage=usage
    )

  def _choice(self, piece: Piece) -> CompletionChoice:
    order, first = self._order, piece.index not in self._begun
    self._begun.add(piece.index)
    prompt = order.jobs[piece.index].prompt
    choice = CompletionChoice(
      index=piece.index,
      text=order.echoes[piece.index] + piece.text if first else piece.text,
      logprobs=self._logprobs(piece, prompt) if self._scores else None,
      finish_reason=piece.finish_reason,
      stop_reason=piece.stop_reason,
    )
    if order.return_ids:
      choice.token_ids = piece.tokens
      choice.prompt_token_ids = list(prompt) if first else UNSET
    if order.prompt_logprobs:
      choice.prompt_logprobs = _prompt_logprobs(prompt, piece.prompt_scores, self._tokenizer)
    return choice

  def _logprobs(self, piece: Piece, prompt: Sequence[int]) -> CompletionLogprobs:
    spelled = lambda token: self._tokenizer.decode([token], skip_special_tokens=False)
    logprobs = CompletionLogprobs([], [], [], [])
    scored: list[ScoredToken | str] = list(piece.scored)
    if self._order.echo_scores and piece.prompt_scores is not None:
      scored = [*_scored_prompt(prompt, piece.prompt_scores, self._order, self._tokenizer), *scored]
    for token in scored:
      if isinstance(token, str):  # of which the model says nothing: the first
        logprobs.tokens.append(token)
        logprobs.token_logprobs.append(None)
        logprobs.top_logprobs.append(None)
        logprobs.text_offset.append(0)
        self._offsets[piece.index] = len(token)
        continue
      logprobs.tokens.append(token.text)
      logprobs.token_logprobs.append(token.logprob)
      # Best first; of tokens that are spelled alike the best stays; the chosen one is always in.
      listed: dict[str, float] = {}
      for other, value in (*token.top, (token.token, token.logprob)):
        listed.setdefault(spelled(other), value)
      logprobs.top_logprobs.append(listed)
      logprobs.text_offset.append(self._offsets[piece.index])
      self._offsets[piece.index] += len(token.text)
    return logprobs


class ChatFormat:
  """Replies in a chat."""

  def __init__(self, header: Header, order: Order, tokenizer: Tokenizer):
    self._header, self._order, self._tokenizer = header, order, tokenizer
    self._scores = order.options.num_top is not None
    self._begun: set[int] = set()
    self._num_calls: dict[int, int] = {}  # by choice

  def whole(self, pieces: Sequence[Piece], usage: Usage) -> Struct:
    """The answer at once."""
    header, order = self._header, self._order
    choices = [
      ChatChoice(
        index=piece.index,
        message=_message(piece),
        logprobs=self._logprobs(piece),
        finish_reason=piece.finish_reason or "abort",
        stop_reason=piece.stop_reason,
        token_ids=piece.tokens if order.return_ids else UNSET,
      )
      for piece in pieces
    ]
    reply = ChatReply(
      id=header.id, created=header.created, model=header.model, choices=choices, usage=usage
    )
    prompt = order.jobs[0].prompt
    if order.return_ids:
      reply.prompt_token_ids = list(prompt)
    if order.prompt_logprobs:
      reply.prompt_logprobs = _prompt_logprobs(prompt, pieces[0].prompt_scores, self._tokenizer)
    return reply

  def chunks(self, piece: Piece, usage: _UsageField) -> Iterator[Struct]:
    """A piece of a stream; the first of a reply also has the role."""
    first, ids = piece.index not in self._begun, self._order.return_ids
    very_first = not self._begun
    self._begun.add(piece.index)
    every = self._scores or ids or isinstance(usage, Usage)
    if not (first or piece.text or piece.calls or piece.finish_reason or every):
      return
    choice = ChatChunkChoice(
      index=piece.index,
      delta=Delta(
        role="assistant" if first else None,
        content=piece.text,
        tool_calls=self._calls(piece) or None,
      ),
      logprobs=self._logprobs(piece),
      finish_reason=piece.finish_reason,
      stop_reason=piece.stop_reason,
      token_ids=piece.tokens if ids else UNSET,
    )
    chunk = self._chunk([choice], usage)
    if ids and very_first:
      chunk.prompt_token_ids = list(self._order.jobs[0].prompt)
    yield chunk

  def last(self, usage: Usage) -> Struct:
    """The chunk that has nothing but the usage."""
    return self._chunk([], usage)

  def _calls(self, piece: Piece) -> list[ToolCall]:
    """The calls of a piece, numbered through the reply."""
    calls = []
    for call in piece.calls:
      at = self._num_calls.get(piece.index, 0)
      self._num_calls[piece.index] = at + 1
      calls.append(_tool_call(call, at))
    return calls

  def _chunk(self, choices: list[ChatChunkChoice], usage: _UsageField) -> ChatChunk:
    header = self._header
    return ChatChunk(
      id=header.id, created=header.created, model=header.model, choices=choices, usage=usage
    )

  def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
    if not self._scores:
      return None
    return ChatLogprobs([self._scored(token) for token in piece.scored])

  def _scored(self, token: ScoredToken) -> TokenLogprob:
    top = [
      TopLogprob(self._tokenizer.decode([t], skip_special_tokens=False), value, self._bytes(t))
      for t, value in token.top
    ]
    return TokenLogprob(token.text, token.logprob, self._bytes(token.token), top)

  def _bytes(self, token: int) -> list[int]:
    known = self._tokenizer.token_bytes(token)
    if known is None:
      known = self._tokenizer.decode([token], skip_special_tokens=False).encode()
    return list(known)


def _message(piece: Piece) -> ReplyMessage:
  if not piece.calls:
    return ReplyMessage(content=piece.text)
  calls = [_tool_call(call) for call in piece.calls]
  return ReplyMessage(content=piece.text.strip() or None, tool_calls=calls)


def _tool_call(call: Call, index: int | UnsetType = UNSET) -> ToolCall:
  function = CalledFunction(call.name, call.arguments)
  return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=function, index=index)


def _scored_prompt(
  prompt: Sequence[int], scores: PromptOutput, order: Order, tokenizer: Tokenizer
) -> Iterator[ScoredToken | str]:
  """The tokens of a prompt as those of outputs; of the first, its text."""
  detokenizer = make_detokenizer(tokenizer, skip_special_tokens=False)
  texts = [detokenizer.push([token]) for token in prompt]
  texts[-1] += detokenizer.flush()
  yield texts[0]
  values, ids, tops = (x.tolist() for x in (scores.logprobs, scores.top_ids, scores.top_logprobs))
  for at, (token, text) in enumerate(zip(prompt[1:], texts[1:], strict=True)):
    top = tuple(zip(ids[at], tops[at], strict=True))[: order.options.num_top]
    yield ScoredToken(token, text, values[at], top)


def _prompt_logprobs(
  prompt: Sequence[int], scores: PromptOutput | None, tokenizer: Tokenizer
) -> PromptLogprobs:
  """As vLLM has them."""
  spelled = lambda token: tokenizer.decode([token], skip_special_tokens=False)
  listed: PromptLogprobs = [None]
  if scores is None:
    return listed
  values, ranks = scores.logprobs.tolist(), scores.ranks.tolist()
  ids, tops = scores.top_ids.tolist(), scores.top_logprobs.tolist()
  for at, token in enumerate(prompt[1:]):
    row = {str(token): PromptLogprob(values[at], ranks[at], spelled(token))}
    for rank, (other, value) in enumerate(zip(ids[at], tops[at], strict=True), 1):
      row.setdefault(str(other), PromptLogprob(value, rank, spelled(other)))
    listed.append(row)
  return listed


def usage_of(order: Order, generation: Generation) -> Usage:
  """Tokens up to now. Of sequences with the same prompt, the first says what was cached."""
  outputs = generation.num_tokens
  cached = {tuple(c.job.prompt): c.cached_tokens for c in reversed(generation.choices)}
  details = PromptTokensDetails(sum(cached.values()))
  return Usage(order.num_prompt, outputs, order.num_prompt + outputs, details)


async def whole(form: Format, order: Order, generation: Generation) -> bytes:
  """Waits for all of the answer.

  Raises:
    ApiError: the request failed.
  """
  pieces = [Piece(index=index) for index in range(len(order.jobs))]
  while not all(piece.finish_reason for piece in pieces):
    for piece in await generation.next():
      pieces[piece.index].add(piece)
  return encode(form.whole(pieces, usage_of(order, generation)))


async def events(form: Format, order: Order, generation: Generation) -> AsyncIterator[bytes]:
  """The answer as server-sent events, each list of news as one block of bytes.

  Raises:
    ApiError: the request failed before the first event; later, an event says so.
  """
  ended = 0
  for turn in itertools.count():
    try:
      pieces = await generation.next()
    except ApiError as error:
      if turn == 0:
        raise
      yield _event(error.reply) + DONE
      return
    usage: _UsageField = UNSET
    if order.continuous_usage:
      usage = usage_of(order, generation)
    elif order.include_usage:
      usage = None
    ended += sum(piece.finish_reason is not None for piece in pieces)
    block = b"".join(_event(chunk) for piece in pieces for chunk in form.chunks(piece, usage))
    if ended == len(order.jobs):
      if order.include_usage:
        block += _event(form.last(usage_of(order, generation)))
      yield block + DONE
      return
    if block:
      yield block


def _event(body: Struct) -> bytes:
  return b"data: " + encode(body) + b"\n\n"
