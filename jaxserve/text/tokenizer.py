"""Text to token ids and back.

`load_tokenizer` is the way in. Whatever the tokenizer, `token_bytes` says which bytes one token
stands for, and decoding is joining bytes: so a streamed text and a text decoded at once agree byte
for byte, and an incomplete character is seen as such (see `detokenizer`). Only for decoders that
cannot be told token by token is `token_bytes` None and `decode` left to `tokenizers`.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

_NUM_BYTES = 256
_SPACE_MARK = "\u2581"  # How SentencePiece writes a space.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer(Protocol):
  """What the engine needs of a tokenizer."""

  @property
  def vocab_size(self) -> int:
    """Ids that can be encoded; a model's vocabulary may be padded beyond it."""

  @property
  def eos_token_ids(self) -> tuple[int, ...]:
    """Tokens that end a reply."""

  @property
  def bos_token_id(self) -> int | None:
    """The token that starts a text, if there is one."""

  def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The ids of `text`; special tokens spelled out in it are recognised.

    Args:
      text: any text.
      add_special_tokens: also those that belong around a text (BOS); not for a rendered chat,
        whose template has put them.
    """

  def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """The text of `ids`, with U+FFFD for what is not UTF-8."""

  def is_special(self, token_id: int) -> bool:
    """Whether the token is a mark for the model rather than text."""

  def token_bytes(self, token_id: int) -> bytes | None:
    """The bytes that the token stands for wherever it appears; empty beyond the vocabulary.

    None if that depends on the tokens around it.
    """


def _byte_level_alphabet() -> Mapping[str, int]:
  """GPT-2's printable stand-ins for the 256 bytes: character -> byte."""
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(_NUM_BYTES) if byte not in set(printable)]
  alphabet = {chr(byte): byte for byte in printable}
  return alphabet | {chr(_NUM_BYTES + n): byte for n, byte in enumerate(others)}


def _byte_level_bytes() -> Callable[[str], bytes]:
  alphabet = _byte_level_alphabet()

  def to_bytes(token: str) -> bytes:
    try:
      return bytes([alphabet[character] for character in token])
    except KeyError:  # An added token, spelled as it is.
      return token.encode()

  return to_bytes


def _byte_fallback_bytes(token: str) -> bytes:
  if match := _BYTE_TOKEN.fullmatch(token):
    return bytes([int(match[1], 16)])
  return token.replace(_SPACE_MARK, " ").encode()


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
  if decoder is None:
    return []
  described = json.loads(decoder.__getstate__())
  return described["decoders"] if described["type"] == "Sequence" else [described]


def _bytes_of_token(steps: Sequence[Mapping[str, Any]]) -> Callable[[str], bytes] | None:
  """How a token's spelling becomes bytes under these decoder steps; None if it is not local."""
  kinds = [step["type"] for step in steps]
  if kinds == ["ByteLevel"]:
    return _byte_level_bytes()
  if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
    replace = steps[0]
    if replace["pattern"] == {"String": _SPACE_MARK} and replace["content"] == " ":
      return _byte_fallback_bytes
  return None


class HfTokenizer:
  """A tokenizer that the library `tokenizers` serialized (the content of a tokenizer.json)."""

  def __init__(
    self, tokenizer_json: str, eos_token_ids: tuple[int, ...] = (), bos_token_id: int | None = None
  ):
    from tokenizers import Tokenizer as Backend

    try:
      self._backend = Backend.from_str(tokenizer_json)
    except Exception as error:  # `tokenizers` raises plain Exception.
      raise ValueError(f"the tokenizer cannot be read: {error}") from None
    self._backend.no_padding()
    self._backend.no_truncation()
    self._eos_token_ids = eos_token_ids
    self._bos_token_id = bos_token_id
    steps = _decoder_steps(self._backend.decoder)
    self._to_bytes = _bytes_of_token(steps)
    self._strips_leading_space = any(step["type"] == "Strip" for step in steps)
    added = self._backend.get_added_tokens_decoder()
    self._special_ids = frozenset(index for index, token in added.items() if token.special)

  @property
  def vocab_size(self) -> int:
    """Ids that can be encoded."""
    return self._backend.get_vocab_size(with_added_tokens=True)

  @property
  def eos_token_ids(self) -> tuple[int, ...]:
    """Tokens that end a reply."""
    return self._eos_token_ids

  @property
  def bos_token_id(self) -> int | None:
    """The token that starts a text."""
    return self._bos_token_id

  def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The ids of `text`; a lone surrogate, which JSON can bring, becomes '?'."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

  def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """The text of `ids`."""
    ids = list(ids)
    if self._to_bytes is None:
      return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
    text = _join(self, ids, skip_special_tokens)
    return text.removeprefix(" ") if self._strips_leading_space else text

  def is_special(self, token_id: int) -> bool:
    """Whether the token is a mark for the model."""
    return token_id in self._special_ids

  def token_bytes(self, token_id: int) -> bytes | None:
    """The bytes that the token stands for."""
    if self._to_bytes is None:
      return None
    token = self._backend.id_to_token(token_id)
    return b"" if token is None else self._to_bytes(token)


class ByteTokenizer:
  """Every byte is a token; the special tokens of ChatML follow. For models with random weights."""

  SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

  @property
  def vocab_size(self) -> int:
    """256 bytes and the special tokens."""
    return _NUM_BYTES + len(self.SPECIAL_TOKENS)

  @property
  def eos_token_ids(self) -> tuple[int, ...]:
    """The end of a message and of a text."""
    return (_NUM_BYTES + 1, _NUM_BYTES + 2)

  @property
  def bos_token_id(self) -> int | None:
    """None: texts start at once."""
    return None

  def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The UTF-8 bytes of `text`; a lone surrogate becomes '?'."""
    del add_special_tokens  # There are none around a text.
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, self.SPECIAL_TOKENS)) + ")", text):
      if part in self.SPECIAL_TOKENS:
        ids.append(_NUM_BYTES + self.SPECIAL_TOKENS.index(part))
      else:
        ids.extend(part.encode("utf-8", "replace"))
    return ids

  def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """The text of `ids`."""
    return _join(self, ids, skip_special_tokens)

  def is_special(self, token_id: int) -> bool:
    """Whether the token is no byte."""
    return token_id >= _NUM_BYTES

  def token_bytes(self, token_id: int) -> bytes:
    """The byte itself, or the spelling of a special token."""
    if token_id < _NUM_BYTES:
      return bytes([token_id])
    if token_id < self.vocab_size:
      return self.SPECIAL_TOKENS[token_id - _NUM_BYTES].encode()
    return b""


def _join(tokenizer: Tokenizer, ids: Iterable[int], skip_special_tokens: bool) -> str:
  kept = (i for i in ids if not (skip_special_tokens and tokenizer.is_special(i)))
  return b"".join(tokenizer.token_bytes(i) or b"" for i in kept).decode("utf-8", "replace")


def load_tokenizer(
  tokenizer_json: str | None,
  eos_token_ids: tuple[int, ...] = (),
  bos_token_id: int | None = None,
) -> Tokenizer:
  """The tokenizer of a checkpoint.

  Args:
    tokenizer_json: what `tokenizers` serialized; None means that bytes are tokens.
    eos_token_ids: tokens that end a reply, as the checkpoint has them.
    bos_token_id: the token that starts a text, if there is one.

  Returns:
    The tokenizer.

  Raises:
    ValueError: if `tokenizer_json` cannot be read.
  """
  if tokenizer_json is None:
    return ByteTokenizer()
  return HfTokenizer(tokenizer_json, eos_token_ids, bos_token_id)
