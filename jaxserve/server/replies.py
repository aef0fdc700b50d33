"""From pieces of generated text to the bytes of an answer, at once or as a stream of events."""

import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from jaxserve.server.errors import ApiError
from jaxserve.server.generation import Generation, Piece, ScoredToken
from jaxserve.server.intake import Order
from jaxserve.server.protocol import (
  ChatChoice,
  ChatChunk,
  ChatChunkChoice,
  ChatLogprobs,
  ChatReply,
  CompletionChoice,
  CompletionLogprobs,
  CompletionReply,
  Delta,
  PromptTokensDetails,
  ReplyMessage,
  TokenLogprob,
  TopLogprob,
  Usage,
  encode,
)
from jaxserve.text.tokenizer import Tokenizer

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
    self._header, self._echoes, self._tokenizer = header, order.echoes, tokenizer
    self._scores = order.options.num_top is not None
    self._offsets = [len(echo) for echo in order.echoes]
    self._begun: set[int] = set()

  def whole(self, pieces: Sequence[Piece], usage: Usage) -> Struct:
    """The answer at once."""
    return self._reply([self._choice(piece) for piece in pieces], usage)

  def chunks(self, piece: Piece, usage: _UsageField) -> Iterator[Struct]:
    """A piece of a stream."""
    choice = self._choice(piece)
    if choice.text or choice.finish_reason or self._scores or isinstance(usage, Usage):
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
    text = piece.text
    if piece.index not in self._begun:
      self._begun.add(piece.index)
      text = self._echoes[piece.index] + text
    return CompletionChoice(
      index=piece.index,
      text=text,
      logprobs=self._logprobs(piece) if self._scores else None,
      finish_reason=piece.finish_reason,
      stop_reason=piece.stop_reason,
    )

  def _logprobs(self, piece: Piece) -> CompletionLogprobs:
    spelled = lambda token: self._tokenizer.decode([token], skip_special_tokens=False)
    logprobs = CompletionLogprobs([], [], [], [])
    for token in piece.scored:
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
    self._header, self._tokenizer = header, tokenizer
    self._scores = order.options.num_top is not None
    self._begun: set[int] = set()

  def whole(self, pieces: Sequence[Piece], usage: Usage) -> Struct:
    """The answer at once."""
    header = self._header
    choices = [
      ChatChoice(
        index=piece.index,
        message=ReplyMessage(content=piece.text),
        logprobs=self._logprobs(piece),
        finish_reason=piece.finish_reason or "abort",
        stop_reason=piece.stop_reason,
      )
      for piece in pieces
    ]
    return ChatReply(
      id=header.id, created=header.created, model=header.model, choices=choices, usage=usage
    )

  def chunks(self, piece: Piece, usage: _UsageField) -> Iterator[Struct]:
    """A piece of a stream; the first of a reply also has the role."""
    first = piece.index not in self._begun
    self._begun.add(piece.index)
    if not (first or piece.text or piece.finish_reason or self._scores or isinstance(usage, Usage)):
      return
    choice = ChatChunkChoice(
      index=piece.index,
      delta=Delta(role="assistant" if first else None, content=piece.text),
      logprobs=self._logprobs(piece),
      finish_reason=piece.finish_reason,
      stop_reason=piece.stop_reason,
    )
    yield self._chunk([choice], usage)

  def last(self, usage: Usage) -> Struct:
    """The chunk that has nothing but the usage."""
    return self._chunk([], usage)

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
