"""JSON bodies to structs: how deep they may be nested, and whole numbers written as 1.0."""

import re
from typing import Any, TypeVar

import msgspec

from jaxserve.server.errors import ApiError, of_decode_error

MAX_DEPTH = 128
_BRACKETS = re.compile(rb'[\[\]{}]|"(?:[^"\\]|\\.)*"', re.DOTALL)

T = TypeVar("T")


def decode(body: bytes, kind: type[T]) -> T:
  """A request of `kind`.

  Raises:
    ApiError: the body is none; 400.
  """
  try:
    decoded = msgspec.json.decode(body, type=kind)
  except msgspec.ValidationError as error:
    if "got `float`" not in str(error):
      raise of_decode_error(error) from None
  except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
    raise of_decode_error(error) from None
  else:
    _check_depth(body)
    return decoded
  # JSON does not tell 1 from 1.0: where a number is taken for an integer, both will do.
  _check_depth(body)
  try:
    return msgspec.convert(_whole_numbers(msgspec.json.decode(body)), kind)
  except (msgspec.DecodeError, RecursionError) as error:
    raise of_decode_error(error) from None


def _check_depth(body: bytes) -> None:
  if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
    return
  depth = 0
  for match in _BRACKETS.finditer(body):
    mark = body[match.start()]
    depth += (mark in b"[{") - (mark in b"]}")
    if depth > MAX_DEPTH:
      message = f"the JSON is nested too deeply: at most {MAX_DEPTH} levels are taken"
      raise ApiError(400, message, "invalid_json")


def _whole_numbers(value: Any) -> Any:
  if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
    return int(value)
  if isinstance(value, list):
    return [_whole_numbers(item) for item in value]
  if isinstance(value, dict):
    return {key: _whole_numbers(item) for key, item in value.items()}
  return value
