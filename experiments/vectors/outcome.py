"""How a scenario can end, and the checks that end it."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any


class Unsupported(Exception):
  """The scenario needs something that jaxserve, or this runner, does not have."""


class Differs(Exception):
  """An expected value is not the one seen."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of one scenario; kind is "pass", "differs" or "unsupported"."""

  kind: str
  name: str
  why: str = ""

  @property
  def line(self) -> str:
    return f"{self.kind} {self.name}" + (f": {self.why}" if self.why else "")


def known_fields(
  record: Mapping[str, Any], known: Collection[str], lacking: Mapping[str, str], where: str
) -> None:
  """Refuses fields that nobody would read.

  Args:
    record: fields of the scenario.
    known: fields that the caller handles.
    lacking: field -> the missing feature; such a field may be there as long as it asks for nothing.
    where: for the message.

  Raises:
    Unsupported: for a lacking feature in use, or a field nobody knows.
  """
  for field, value in record.items():
    if field in lacking and value:
      raise Unsupported(f"{lacking[field]} ({field} in {where})")
  for field in record:
    if field not in known and field not in lacking:
      raise Unsupported(f"unknown field {field} in {where}")


def equal(where: str, seen: Any, expected: Any) -> None:
  """Raises Differs unless both are equal; numbers that are not whole to 1e-5."""
  if isinstance(expected, float) and isinstance(seen, int | float):
    same = abs(seen - expected) <= 1e-5
  else:
    same = seen == expected
  if not same:
    raise Differs(f"{where}: expected {expected}, got {seen}")
