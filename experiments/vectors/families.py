"""Lists in which 'x*n' stands for n requests of the family x, in any order."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.vectors.outcome import Differs

Row = tuple[Any, ...]  # request, then what else is compared


def match_names(
  where: str, seen: Sequence[str], expected: Sequence[str], family: Mapping[str, str]
) -> None:
  """Raises Differs unless the requests are those expected."""
  _match(where, [(name,) for name in seen], [(str(name),) for name in expected], family)


def match_prefills(
  where: str, seen: Sequence[Row], expected: Sequence[Sequence[Any]], family: Mapping[str, str]
) -> None:
  """Raises Differs unless the (request, start, tokens) are those expected."""
  _match(where, [tuple(row) for row in seen], [tuple(row) for row in expected], family)


def _match(
  where: str, seen: Sequence[Row], expected: Sequence[Row], family: Mapping[str, str]
) -> None:
  left = list(seen)
  groups = []
  for row in expected:
    if row[0] in family:
      if row not in left:
        raise _difference(where, seen, expected, family)
      left.remove(row)
    else:
      groups.append(row)
  for name, *rest in groups:
    group = re.fullmatch(r"(.+)\*(\d+)", name)
    if not group:
      raise Differs(f"{where}: expects {name}, which is no request")
    members = [row for row in left if family[row[0]] == group[1] and list(row[1:]) == rest]
    if len(members) < int(group[2]):
      raise _difference(where, seen, expected, family)
    for row in members[: int(group[2])]:
      left.remove(row)
  if left:
    raise _difference(where, seen, expected, family)


def _difference(
  where: str, seen: Sequence[Row], expected: Sequence[Row], family: Mapping[str, str]
) -> Differs:
  return Differs(f"{where}: expected {_text(expected)}, got {_text(_collapsed(seen, family))}")


def _collapsed(seen: Sequence[Row], family: Mapping[str, str]) -> list[Row]:
  """Equal rows of one family as one row, for the message."""
  counts: dict[Row, list[str]] = {}
  for name, *rest in seen:
    counts.setdefault((family[name], *rest), []).append(name)
  return [
    (f"{key[0]}*{len(names)}" if len(names) > 1 else names[0], *key[1:])
    for key, names in counts.items()
  ]


def _text(rows: Sequence[Row]) -> str:
  return str([row[0] if len(row) == 1 else list(row) for row in rows])
