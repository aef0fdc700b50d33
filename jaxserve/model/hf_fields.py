"""Numbers out of a `config.json`, with errors that name the key. A null is read as absent."""

from collections.abc import Mapping
from typing import Any


def refuse(what: str, value: object, remedy: str) -> ValueError:
  """The error for a value that is understood and not supported."""
  return ValueError(f"config.json: {what}={value!r} is not supported; {remedy}")


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
  """The finite number at `key`, `default` where it is absent; ValueError for anything else."""
  value = config.get(key)
  if value is None:
    value = default
  if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
    raise ValueError(f"config.json: {key}={value!r}: a number is needed")
  return value


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
  """The whole number at `key`; 1e5 counts as one."""
  value = number(config, key, default)
  if value != int(value):
    raise ValueError(f"config.json: {key}={value!r}: a whole number is needed")
  return int(value)


def present(config: Mapping[str, Any]) -> dict[str, Any]:
  """`config` without its nulls."""
  return {key: value for key, value in config.items() if value is not None}
