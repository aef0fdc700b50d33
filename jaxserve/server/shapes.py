"""Which values of a field are taken, as far as a JSON schema can say it. `intake` checks them.

What no schema says: whether a prompt fits, rules between fields, whether a template takes a
conversation, whether a grammar is one. Those are 400s with codes of their own (docs/serving.md).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.types.sampling import MAX_BIAS, MAX_TOP

Schema = dict[str, Any]

INT32_MAX = (1 << 31) - 1
MAX_N = 128
MAX_STOPS, MAX_STOP_CHARS = 32, 1024
MAX_BAD_WORDS = 256
MAX_TOOLS = 128
MAX_TEMPERATURE = 2
# What a chat template gets from fields of their own.
TEMPLATE_NAMES = frozenset(
  ("template", "messages", "add_generation_prompt", "bos_token", "eos_token", "now", "tools")
)
_TEXT: Schema = {"type": "string", "minLength": 1}
_OBJECT: Schema = {"type": "object"}
_NULL: Schema = {"type": "null"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
  """What depends on the server.

  Attributes:
    model: what clients call it.
    vocab_size: tokens.
    room: sequences that a request can have at most.
    prioritized: requests may have priorities.
    budgets: the least and the most tokens of a step.
  """

  model: str
  vocab_size: int
  room: int
  prioritized: bool
  budgets: tuple[int, int]


def fields(bounds: Bounds) -> Mapping[str, Schema]:
  """By field, whatever request it is in: what it is if it is not null."""
  stop = {**_TEXT, "maxLength": MAX_STOP_CHARS}
  token = _number(0, bounds.vocab_size - 1, "integer")
  tokens = {"type": "array", "items": token}
  prompt = _list(token, least=1)
  words = _list(_TEXT, least=1)
  many = {"least": 1, "most": bounds.room}
  urgency = INT32_MAX if bounds.prioritized else 0
  share, penalty, top = _number(0, 1), _number(-2, 2), _number(0, MAX_TOP, "integer")
  return {
    "model": {"type": "string", "enum": [bounds.model]},
    "prompt": {"anyOf": [_TEXT, _list(_TEXT, **many), prompt, _list(prompt, **many)]},
    "messages": {"type": "array", "minItems": 1, "items": _ref("Message")},
    "temperature": _number(0, MAX_TEMPERATURE),
    "top_p": share,
    "min_p": share,
    "top_k": _number(-1, None, "integer"),
    "n": _number(1, min(MAX_N, bounds.room), "integer"),
    "best_of": _number(1, min(MAX_N, bounds.room), "integer"),
    "stop": {"anyOf": [stop, _list(stop, most=MAX_STOPS)]},
    "stop_token_ids": tokens,
    "allowed_token_ids": prompt,
    "priority": _number(-urgency, urgency, "integer"),
    "min_tokens": _number(0, None, "integer"),
    "max_completion_tokens": _number(1, None, "integer"),
    "prompt_logprobs": top,
    "top_logprobs": top,
    "presence_penalty": penalty,
    "frequency_penalty": penalty,
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 1000},
    "logit_bias": {
      "type": "object",
      "maxProperties": MAX_BIAS,
      "propertyNames": {"pattern": numbers_below(bounds.vocab_size)},
      "additionalProperties": _number(-100, 100),
    },
    "bad_words": _list(_TEXT, most=MAX_BAD_WORDS),
    "choice": words,
    "guided_choice": words,
    "response_format": _response_format(),
    "chat_template_kwargs": {
      "type": "object", "propertyNames": {"not": {"enum": sorted(TEMPLATE_NAMES)}}
    },
    "tools": _list(_typed("function", function=_FUNCTION), most=MAX_TOOLS),
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _CHOSEN]},
    # Known, and refused unless they ask for nothing.
    "suffix": {"const": ""},
    "continue_final_message": {"const": False},
    "functions": {"type": "array", "maxItems": 0},
    "function_call": {"enum": ["none", "auto"]},
    "modalities": _list({"const": "text"}, most=1),
    "budget": _number(*bounds.budgets, "integer"),
    "tokens": tokens,
  }  # fmt: skip


def own_fields() -> Mapping[str, Mapping[str, Schema]]:
  """By request and field: those that mean something else elsewhere."""
  return {
    "CompletionRequest": {
      "max_tokens": _number(0, None, "integer"), "logprobs": _number(0, MAX_TOP, "integer"),
    },
    "ChatRequest": {"max_tokens": _number(1, None, "integer"), "echo": {"const": False}},
    "TokenizeRequest": {"prompt": {"type": "string"}},
  }  # fmt: skip


def structs() -> Mapping[str, Schema]:
  """By struct, what holds for all of it."""
  called = {"tool_calls": {"type": "array", "minItems": 1}}
  said = {"content": {"type": ["string", "array"]}}
  text = {"prompt": {"type": "string"}, "messages": _NULL}
  chat = {"messages": {"type": "array"}, "prompt": _NULL}
  return {
    "Message": {"anyOf": [_has("content", said), _has("tool_calls", called)]},
    "TokenizeRequest": {"anyOf": [_has("prompt", text), _has("messages", chat)]},
  }


def numbers_below(end: int) -> str:
  """A regular expression of 0, 1, ..., end - 1, written without leading zeros."""
  last = str(end - 1)
  parts = ["0"] if end > 1 and len(last) > 1 else []
  if len(last) > 1:
    parts.append(f"[1-9][0-9]{{0,{len(last) - 2}}}")
  for at, digit in enumerate(last):
    least = 1 if at == 0 and len(last) > 1 else 0
    if int(digit) > least:
      parts.append(f"{last[:at]}[{least}-{int(digit) - 1}][0-9]{{{len(last) - 1 - at}}}")
  return f"^({'|'.join([*dict.fromkeys(parts), last])})$"


def _number(least: float | None, most: float | None, kind: str = "number") -> Schema:
  bounds = {"minimum": least, "maximum": most}
  return {"type": kind, **{name: value for name, value in bounds.items() if value is not None}}


def _list(items: Schema, *, least: int = 0, most: int | None = None) -> Schema:
  bounds = {"minItems": least or None, "maxItems": most}
  return {
    "type": "array", "items": items, **{k: v for k, v in bounds.items() if v is not None},
  }  # fmt: skip


def _ref(struct: str) -> Schema:
  return {"$ref": f"#/components/schemas/{struct}"}


def _has(field: str, properties: Mapping[str, Schema]) -> Schema:
  return {"required": [field], "properties": dict(properties)}


def _typed(kind: str, **properties: Schema) -> Schema:
  """An object that says what it is."""
  return {
    "type": "object", "required": ["type", *properties],
    "properties": {"type": {"const": kind}, **properties},
  }  # fmt: skip


def _response_format() -> Schema:
  schema = {"type": "object", **_has("schema", {"schema": _OBJECT})}
  return {
    "anyOf": [_typed("text"), _typed("json_object"), _typed("json_schema", json_schema=schema)]
  }


_NAMED: Schema = {"type": "object", **_has("name", {"name": {"type": "string"}})}
_CHOSEN = _typed("function", function=_NAMED)
_FUNCTION: Schema = {
  "type": "object",
  **_has("name", {"name": {"type": "string"}, "parameters": {"type": ["object", "null"]}}),
}
