"""Records as JSON and back, checked field by field against their type hints."""

import dataclasses
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal


class RecordingError(ValueError):
  """A recording that cannot be used; the message names line, field, value and remedy."""


def to_plain(value: Any) -> Any:
  """A record as dicts, lists and numbers.

  Raises:
    RecordingError: it holds code, such as a policy that is not in the table.
  """
  if callable(value):
    raise RecordingError(
      f"{value!r}: code cannot be recorded; give the policy a name in jaxserve.sched.POLICIES"
    )
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
  if isinstance(value, Mapping):
    return {key: to_plain(item) for key, item in value.items()}
  return [to_plain(item) for item in value] if isinstance(value, tuple | list) else value


def from_plain(hint: Any, value: Any, where: str) -> Any:
  """The inverse of `to_plain`: sequences become tuples, keys that no field has are passed over.

  Args:
    hint: what `value` should be: a dataclass, or the type hint of one of its fields.
    value: plain data.
    where: it comes from, for messages.

  Raises:
    RecordingError: a field is missing or has another type.
  """
  if dataclasses.is_dataclass(hint) and isinstance(hint, type):
    return _record(hint, value, where)
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in (tuple, Sequence):
    _expect(isinstance(value, list), value, where, "a list")
    return tuple(from_plain(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
  if origin in (typing.Union, types.UnionType) and type(None) in args:
    rest = next(arg for arg in args if arg is not type(None))
    return None if value is None else from_plain(rest, value, where)
  if origin is Mapping:
    _expect(isinstance(value, dict), value, where, "an object")
    return {key: from_plain(args[1], item, f"{where}.{key}") for key, item in value.items()}
  if origin is Literal:
    _expect(value in args, value, where, f"one of {', '.join(map(repr, args))}")
    return value
  return _number_or_text(hint, value, where)


def _number_or_text(hint: Any, value: Any, where: str) -> Any:
  if hint is float and type(value) is int:
    return float(value)
  if hint is Hashable:  # a policy, by its name
    hint = str
  allowed = typing.get_args(hint) or (hint,)
  _expect(type(value) in allowed, value, where, " or ".join(t.__name__ for t in allowed))
  return value


def _record(cls: type, value: Any, where: str) -> Any:
  _expect(isinstance(value, dict), value, where, "an object")
  hints, fields = typing.get_type_hints(cls), {}
  for field in dataclasses.fields(cls):
    if field.name in value:
      at = f"{where}.{field.name}"
      fields[field.name] = from_plain(hints[field.name], value[field.name], at)
    elif field.default is field.default_factory is dataclasses.MISSING:
      raise RecordingError(f"{where}: the field {field.name!r} is missing; record the run again")
  try:
    return cls(**fields)
  except ValueError as error:
    raise RecordingError(f"{where}: {error}") from error


def _expect(ok: bool, value: Any, where: str, wanted: str) -> None:
  if not ok:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise RecordingError(f"{where}={shown}: must be {wanted}; record the run again")
