"""Texts that an output must not have (`bad_words`): the last token of one is never drawn behind the
others. A word is what the tokenizer makes of it, at the beginning of a text and behind a space;
spelled by other tokens it may still come, as with vLLM.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxserve.model.logit_edits import WORD
from jaxserve.server.grammar import Grammar
from jaxserve.text.tokenizer import Tokenizer

Run = tuple[int, ...]


def runs_of(words: Sequence[str], tokenizer: Tokenizer) -> list[Run]:
  """The tokens of each word, without and with a space in front."""
  runs: dict[Run, None] = {}
  for word in words:
    bare = tuple(tokenizer.encode(word.lstrip(" "), add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" " + word.lstrip(" "), add_special_tokens=False))
    if bare:
      runs[bare] = None
    # A space that is a token of its own adds nothing: the bare word is refused behind it as well.
    if spaced and (not bare or (spaced[0] != bare[0] and len(spaced) == len(bare))):
      runs[spaced] = None
  return list(runs)


@dataclasses.dataclass(frozen=True)
class Barred:
  """What one request bars, before it has an output.

  Attributes:
    runs: of tokens that must not come in a row.
    allowed: u32[words], what its other options allow.
    min_tokens: before so many outputs nothing ends it.
    stops: the tokens that would.
  """

  runs: Sequence[Run]
  allowed: np.ndarray
  min_tokens: int
  stops: Sequence[int]


class BadWords:
  """The state of one output, for the engine; `error` says why it could not go on."""

  def __init__(self, barred: Barred, grammar: Grammar | None):
    self._barred, self._grammar = barred, grammar
    self._outputs: list[int] = []
    self._error: str | None = None

  @property
  def error(self) -> str | None:
    """None while there is something to draw."""
    return self._error or (self._grammar.error if self._grammar else None)

  def copy(self) -> "BadWords":
    """Another output from the beginning."""
    return BadWords(self._barred, self._grammar and self._grammar.copy())

  def mask(self) -> np.ndarray:
    """u32[words]; everything once there was an error, since the next token ends it."""
    barred = self._barred
    mask = barred.allowed & self._grammar.mask() if self._grammar else barred.allowed.copy()
    for *before, last in barred.runs:
      if not before or self._outputs[-len(before) :] == before:
        _clear(mask, last)
    left = mask
    if len(self._outputs) < barred.min_tokens:
      left = mask.copy()
      for token in barred.stops:
        _clear(left, token)
    if self.error is None and not left.any():
      self._error = "bad_words leaves nothing to be drawn"
    return mask if self.error is None else np.full_like(mask, 0xFFFFFFFF)

  def accept(self, token: int) -> bool:
    """Takes an output; True if it was the last."""
    self._outputs.append(token)
    over = self._grammar is not None and self._grammar.accept(token)
    return over or self.error is not None


def _clear(mask: np.ndarray, token: int) -> None:
  mask[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)
