"""Structured output: a JSON schema, a regular expression or a grammar decides what may come.

llguidance (extra: structured) keeps the state and computes the bitmasks; what may take long or much
memory has a limit there, and exceeding it ends the request with an error, not the server.
"""

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.model.logit_edits import num_words
from jaxserve.server.errors import ApiError, conflicting, invalid, unsupported
from jaxserve.server.protocol import Sampled
from jaxserve.text.tokenizer import Tokenizer

_MAX_SOURCE_CHARS = 1 << 18
_INSTALL = "pip install 'jaxserve[structured]'"
# About 20 ms to build a lexer and at most 10 ms for a mask; the defaults are about twice that.
_LIMITS: dict[str, Any] = {
  "initial_lexer_fuel": 1_000_000,
  "step_lexer_fuel": 100_000,
  "step_max_items": 50_000,
  "max_lexer_states": 50_000,
  "max_grammar_size": 100_000,
  "verbose_errors": False,
}


@dataclasses.dataclass(frozen=True)
class Wanted:
  """What an output has to be: of kind "json" (a schema), "regex", "choice" or "lark"."""

  param: str
  kind: str
  source: Any


class Grammar:
  """The state of one output, for the engine; `error` says why it could not go on."""

  def __init__(self, matcher: Any, words: int, eos: frozenset[int]):
    self._matcher, self._words, self._eos = matcher, words, eos
    self.error: str | None = None

  def copy(self) -> "Grammar":
    """Another output from the same state."""
    return Grammar(self._matcher.deep_copy(), self._words, self._eos)

  def mask(self) -> np.ndarray:
    """u32[words]; everything once there was an error, since the next token ends it."""
    mask = np.zeros(self._words, np.uint32)
    if self.error is None:
      self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
      if self._matcher.is_error() or not mask.any():
        self.error = _reason(self._matcher) or "nothing may follow"
    return mask if self.error is None else np.full(self._words, 0xFFFFFFFF, np.uint32)

  def accept(self, token: int) -> bool:
    """Takes an output; True if it was the last."""
    if self.error is None and token not in self._eos and not self._matcher.consume_token(token):
      self.error = _reason(self._matcher) or "the token does not fit"
    return self.error is not None or token in self._eos or self._matcher.is_stopped()


class Grammars:
  """Makes grammars for one tokenizer. Any thread may ask."""

  def __init__(self, tokenizer: Tokenizer, vocab_size: int):
    self._tokenizer, self._vocab_size = tokenizer, vocab_size
    self._lock = threading.Lock()
    self._backend: Any = None

  def make(self, wanted: Wanted) -> Grammar:
    """The grammar of what is wanted.

    Raises:
      ApiError: it is no such thing, it is too complex, or this server cannot serve it.
    """
    param = wanted.param
    try:
      import llguidance
    except ImportError:
      raise unsupported(param, f"this server lacks the package llguidance; {_INSTALL}") from None
    if self._tokenizer.token_bytes(0) is None:
      raise unsupported(param, "this model's tokenizer cannot be constrained")
    try:
      limits = llguidance.LLParserLimits(**_LIMITS)
      source = _source(wanted)
      matcher = llguidance.LLMatcher(self._ll_tokenizer(), source, log_level=0, limits=limits)
    except (ValueError, TypeError, RecursionError) as error:
      raise ApiError(400, f"{param}: {error}", "invalid_structure", param) from None
    if matcher.is_error():
      raise ApiError(400, f"{param}: {_reason(matcher)}", "invalid_structure", param)
    return Grammar(matcher, num_words(self._vocab_size), frozenset(self._tokenizer.eos_token_ids))

  def _ll_tokenizer(self) -> Any:
    import llguidance

    with self._lock:
      if self._backend is None:
        eos = list(self._tokenizer.eos_token_ids)
        if not eos:
          raise ValueError("this model has no token that ends an output")
        words = llguidance.TokenizerWrapper(_Words(self._tokenizer))
        self._backend = llguidance.LLTokenizer(words, n_vocab=self._vocab_size, eos_token=eos)
      return self._backend


class _Words:
  """A tokenizer as llguidance reads it."""

  def __init__(self, tokenizer: Tokenizer):
    size = range(tokenizer.vocab_size)
    self._tokenizer = tokenizer
    self.eos_token_id, self.bos_token_id = tokenizer.eos_token_ids[0], tokenizer.bos_token_id
    self.tokens = [tokenizer.token_bytes(token) or b"" for token in size]
    self.special_token_ids = [token for token in size if tokenizer.is_special(token)]

  def __call__(self, text: str | bytes) -> list[int]:
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return self._tokenizer.encode(text, add_special_tokens=False)


def _reason(matcher: Any) -> str:
  return matcher.get_error().removesuffix("<non-verbose/>").strip()


def _source(wanted: Wanted) -> str:
  import llguidance

  source = wanted.source if isinstance(wanted.source, str) else json.dumps(wanted.source)
  if len(source) > _MAX_SOURCE_CHARS:
    raise ValueError(f"has {len(source)} characters; at most {_MAX_SOURCE_CHARS} are taken")
  match wanted.kind:
    case "json":
      return llguidance.LLMatcher.grammar_from_json_schema(source)
    case "regex":
      return llguidance.LLMatcher.grammar_from_regex(source)
    case "choice":
      return llguidance.LLMatcher.grammar_from_lark("start: " + _alternatives(wanted.source))
    case _:
      return llguidance.LLMatcher.grammar_from_lark(source)


def _alternatives(texts: Sequence[str]) -> str:
  if not texts or not all(isinstance(text, str) and text for text in texts):
    raise ValueError("must be a list of texts, none of them empty")
  return " | ".join(json.dumps(text) for text in texts)


def wanted_of(request: Sampled, calls: Wanted | None = None) -> Wanted | None:
  """What a request asks its outputs to be, tool calls or something else; None for any text.

  Raises:
    ApiError: it asks for two things, or for nothing that exists.
  """
  given = (calls, _of_format(request.response_format), *_of_fields(request))
  found = [wanted for wanted in given if wanted is not None]
  if len(found) > 1:
    message = f"{found[1].param}: {found[0].param} is given already"
    raise conflicting(found[1].param, message)
  return found[0] if found else None


def _of_format(given: Mapping[str, Any] | None) -> Wanted | None:
  param = "response_format"
  match given:
    case None | {"type": "text"}:
      return None
    case {"type": "json_object"}:
      return Wanted(param, "json", {"type": "object"})
    case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
      return Wanted(param, "json", schema)
    case {"type": "json_schema"}:
      raise invalid(param, "response_format: needs json_schema={name, schema}")
  raise invalid(param, "response_format: type must be text, json_object or json_schema")


def _of_fields(request: Sampled) -> list[Wanted]:
  """The fields of vLLM, the newer one and those that it took the place of."""
  given: list[tuple[str, str, Any]] = [
    ("guided_json", "json", request.guided_json),
    ("guided_regex", "regex", request.guided_regex),
    ("guided_choice", "choice", request.guided_choice),
    ("guided_grammar", "lark", request.guided_grammar),
  ]
  if (options := request.structured_outputs) is not None:
    param = "structured_outputs"
    given += [
      (param, "json", options.json),
      (param, "regex", options.regex),
      (param, "choice", options.choice),
      (param, "lark", options.grammar),
      (param, "json", {"type": "object"} if options.json_object else None),
    ]
  return [Wanted(param, kind, source) for param, kind, source in given if source is not None]
