"""Token ids to text while they are generated.

A character can span tokens, and a token can end inside a character. What may be sent is decided by
bytes: an incomplete UTF-8 sequence waits for at most three more bytes. Deciding by the decoded text
("it ends with U+FFFD"), as decode streams commonly do, never sends anything again once the model
writes a real U+FFFD, or bytes that are no text.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from jaxserve.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_UTF8_BYTES = 4


class Detokenizer(Protocol):
  """One request's text, as it grows."""

  def push(self, ids: Iterable[int]) -> str:
    """Takes the next tokens; returns the text that is now certain, often that of these tokens."""

  def flush(self) -> str:
    """Ends the text: U+FFFD if it stopped inside a character, else ''. Then it starts afresh."""


class ByteDetokenizer:
  """For tokenizers whose every token stands for the same bytes wherever it appears."""

  def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
    self._tokenizer = tokenizer
    self._skip_special_tokens = skip_special_tokens
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

  def push(self, ids: Iterable[int]) -> str:
    """Takes the next tokens; returns the text that is now certain."""
    tokenizer, skip = self._tokenizer, self._skip_special_tokens
    kept = (i for i in ids if not (skip and tokenizer.is_special(i)))
    return self._decoder.decode(b"".join(tokenizer.token_bytes(i) or b"" for i in kept))

  def flush(self) -> str:
    """Ends the text."""
    text = self._decoder.decode(b"", final=True)
    self._decoder.reset()
    return text


class WindowDetokenizer:
  """For every other tokenizer: decodes a window of a few tokens twice, and takes the difference."""

  def __init__(
    self,
    tokenizer: Tokenizer,
    *,
    prompt_ids: Sequence[int] = (),
    skip_special_tokens: bool = True,
  ):
    self._tokenizer = tokenizer
    self._skip_special_tokens = skip_special_tokens
    self._context = [i for i in prompt_ids if not tokenizer.is_special(i)][-_MAX_UTF8_BYTES:]
    self._pending: list[int] = []

  def push(self, ids: Iterable[int]) -> str:
    """Takes the next tokens; returns the text that is now certain."""
    return "".join(self._push_one(i) for i in ids)

  def _push_one(self, token_id: int) -> str:
    if self._skip_special_tokens and self._tokenizer.is_special(token_id):
      return ""
    self._pending.append(token_id)
    text = self._pending_text()
    if not text or (text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_UTF8_BYTES):
      return ""
    self._context, self._pending = self._pending, []
    return text

  def _pending_text(self) -> str:
    skip = self._skip_special_tokens
    before = self._tokenizer.decode(self._context, skip_special_tokens=skip)
    now = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=skip)
    return now[len(before) :]

  def flush(self) -> str:
    """Ends the text."""
    text = self._pending_text() if self._pending else ""
    self._context, self._pending = [], []
    return text


def make_detokenizer(
  tokenizer: Tokenizer, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
) -> Detokenizer:
  """The detokenizer that suits a tokenizer.

  Args:
    tokenizer: of the model.
    prompt_ids: what the text continues; its last tokens decide how the first new one is spaced.
    skip_special_tokens: leave marks for the model out of the text.

  Returns:
    A detokenizer. Its pushes and one flush, joined, are the request's text; streamed or not.
  """
  if tokenizer.token_bytes(0) is None:
    return WindowDetokenizer(
      tokenizer, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens
    )
  return ByteDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
