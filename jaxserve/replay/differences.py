"""Two runs side by side: where they part first, and how much they differ. Times do not count."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.replay.codec import to_plain
from jaxserve.replay.recording import Header, Run, RunEvent, StepRecord, kind_of

TIMES = frozenset({"start_s", "end_s", "time_s"})
MISSING = "nothing"
_SHOWN_CHARS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """Where two runs part.

  Attributes:
    step: number of the step, or of the one before which something else differs.
    field: such as "logits" or "requests[0].tokens"; of other lines with their kind and request,
      such as "submit 'long'.prompt[7]".
    left: value in the first run.
    right: value in the second.
  """

  step: int
  field: str
  left: Any
  right: Any

  def __str__(self) -> str:
    return f"step {self.step}: {self.field}: {_shown(self.left)} | {_shown(self.right)}"


def _shown(value: Any) -> str:
  text = str(value)
  return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def first_field(left: Any, right: Any, where: str = "") -> tuple[str, Any, Any] | None:
  """The first place at which two pieces of plain data differ, and what stands there."""
  if isinstance(left, Mapping) and isinstance(right, Mapping):
    prefix = f"{where}." if where else ""
    pairs = [
      (f"{prefix}{key}", left.get(key, MISSING), right.get(key, MISSING))
      for key in dict.fromkeys((*left, *right))
      if key not in TIMES
    ]
  elif isinstance(left, list) and isinstance(right, list):
    both = enumerate(itertools.zip_longest(left, right, fillvalue=MISSING))
    pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in both]
  else:
    return None if left == right and type(left) is type(right) else (where, left, right)
  return next((found for at, a, b in pairs if (found := first_field(a, b, at))), None)


def event_difference(left: RunEvent | None, right: RunEvent | None, step: int) -> Difference | None:
  """The first field in which two events differ; None stands for an event that did not happen.

  Args:
    left: of the first run.
    right: of the second.
    step: number of the next step line, for what happens between two steps.
  """
  if left is None or right is None or type(left) is not type(right):
    return Difference(step=step, field="event", left=_label(left), right=_label(right))
  found = first_field(to_plain(left), to_plain(right))
  if found is None:
    return None
  field = found[0] if isinstance(left, StepRecord) else f"{_label(left)}.{found[0]}"
  return Difference(step=step, field=field, left=found[1], right=found[2])


def _label(event: RunEvent | None) -> str:
  if event is None:
    return MISSING
  if isinstance(event, StepRecord):
    return f"step {event.step}"
  name = getattr(event, "id", None)
  return kind_of(event) if name is None else f"{kind_of(event)} {name!r}"


def first_difference(left: Run, right: Run) -> Difference | None:
  """Where two runs part first: params at the start, then line by line."""
  found = first_field(dict(left.params), dict(right.params), "params")
  if found:
    return Difference(step=0, field=found[0], left=found[1], right=found[2])
  step = 0
  for a, b in itertools.zip_longest(left.events, right.events):
    difference = event_difference(a, b, step)
    if difference:
      return difference
    step += isinstance(a, StepRecord)
  return None


def first_step_difference(left: Run, right: Run) -> Difference | None:
  """The first step whose plan or outputs differ, whatever was submitted."""
  pairs = enumerate(itertools.zip_longest(left.steps, right.steps))
  return next((d for number, (a, b) in pairs if (d := event_difference(a, b, number))), None)


def header_differences(left: Header, right: Header) -> list[str]:
  """Settings that differ, one a line; the salt, drawn for every recording, and params do not count.

  They are no difference of the runs by themselves.
  """
  a, b = to_plain(left), to_plain(right)
  lines = []
  for key in a:
    if key in ("salt", "params"):
      continue
    parts = a[key] if isinstance(a[key], dict) else {"": a[key]}
    others = b[key] if isinstance(b[key], dict) else {"": b[key]}
    for name in parts:
      found = first_field(parts[name], others.get(name, MISSING), f"{key}.{name}".rstrip("."))
      lines += [f"{found[0]}: {_shown(found[1])} | {_shown(found[2])}"] if found else []
  return lines


def summary(left: Run, right: Run) -> list[tuple[str, str, str]]:
  """Numbers of both runs, as (what, first, second)."""
  rows = [(f"{name}", f"{a:,}", f"{b:,}") for name, a, b in zip(
    ("steps", "tokens", "padding", "preemptions", "requests", "output tokens"),
    _numbers(left), _numbers(right), strict=True,
  )]  # fmt: skip
  return [*rows, ("seconds", f"{_seconds(left):.3f}", f"{_seconds(right):.3f}")]


def agreement(left: Run, right: Run) -> str:
  """How many steps and requests are the same."""
  pairs = list(itertools.zip_longest(left.steps, right.steps))
  steps = sum(event_difference(a, b, 0) is None for a, b in pairs)
  ours, theirs = left.tokens, right.tokens
  names = dict.fromkeys((*ours, *theirs))
  tokens = sum(ours.get(name) == theirs.get(name) for name in names)
  return (
    f"{steps} of {len(pairs)} steps are the same; {tokens} of {len(names)} requests have the same "
    "output tokens"
  )


def _numbers(run: Run) -> Sequence[int]:
  steps = run.steps
  return (
    len(steps),
    sum(step.num_tokens for step in steps),
    sum(step.padding for step in steps),
    sum(len(step.preempted) for step in steps),
    len(run.tokens),
    sum(len(step.outputs) for step in steps),
  )


def _seconds(run: Run) -> float:
  steps = run.steps
  return steps[-1].end_s - steps[0].start_s if steps else 0.0
