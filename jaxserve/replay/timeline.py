"""A recorded run as text: who was served in which step, under a bar of the budget."""

import dataclasses
from collections.abc import Sequence

from jaxserve.replay import charts, svg
from jaxserve.replay.recording import Abort, Finish, Run, StepRecord, Submit
from jaxserve.replay.report import STYLE

PREFILL, DECODE, WAITING, PREEMPTED, ABSENT = "█", "─", "·", "×", " "
LEGEND = f"{PREFILL} prefill   {DECODE} decode   {WAITING} not scheduled   {PREEMPTED} preempted"
_BAR_LINES = 4
_LEVELS = " ▁▂▃▄▅▆▇█"
# In a column of several steps the first of these that happened is shown.
_LOUDEST = (PREEMPTED, PREFILL, DECODE, WAITING, ABSENT)


@dataclasses.dataclass(frozen=True)
class _Stay:
  """A request is in the engine during steps [first, last]."""

  first: int
  last: int


def text(run: Run, width: int = 100) -> str:
  """A budget bar and one line a request, steps from left to right.

  Args:
    run: what to draw.
    width: characters of a line, at least 40; where steps do not fit, several share a column.

  Returns:
    Lines without a final newline.
  """
  steps = run.steps
  if not steps:
    return "no step"
  names = list(run.tokens)
  margin = max(len("tokens/budget"), *(len(name) for name in names), 0) + 2
  per_column = -(-len(steps) // max(max(width, 40) - margin, 1))
  groups = [range(i, min(i + per_column, len(steps))) for i in range(0, len(steps), per_column)]
  budgets = sorted({step.budget for step in steps})
  shown = f"{budgets[0]:,}" if len(budgets) == 1 else f"{budgets[0]:,} to {budgets[-1]:,}"
  lines = [f"budget {shown} tokens a step"]
  labels = ["tokens/budget", *[""] * (_BAR_LINES - 1)]
  bars = _budget_bars(steps, groups)
  lines += [f"{label:>{margin - 2}} │{bar}" for label, bar in zip(labels, bars, strict=True)]
  stays = _stays(run)
  for name in names:
    cells = _cells(name, steps, stays[name])
    lines.append(f"{name:>{margin - 2}} │{_columns(cells, groups)}")
  last = f"{len(steps) - 1}"
  axis = f"0{last:>{len(groups) - 1}}" if len(groups) > len(last) else "0"
  note = f", {per_column} a column" if per_column > 1 else ""
  return "\n".join([*lines, f"{'step':>{margin - 2}}  {axis}{note}", LEGEND])


def drawing(run: Run) -> str:
  """The same over time, as an SVG file: tokens of every step against the budget, and requests."""
  record = run.record()
  return svg.standalone(charts.run_chart(record, record.end_s - record.start_s), STYLE)


def _budget_bars(steps: Sequence[StepRecord], groups: Sequence[range]) -> list[str]:
  """Lines from top to bottom; a full column is a budget that was used up."""
  units = _BAR_LINES * (len(_LEVELS) - 1)
  heights = []
  for group in groups:
    share = sum(steps[i].num_tokens / max(steps[i].budget, 1) for i in group) / len(group)
    heights.append(max(round(share * units), 1))  # a step always has a token
  lines = []
  for line in reversed(range(_BAR_LINES)):
    base, most = line * (len(_LEVELS) - 1), len(_LEVELS) - 1
    lines.append("".join(_LEVELS[min(max(height - base, 0), most)] for height in heights))
  return lines


def _stays(run: Run) -> dict[str, _Stay]:
  """When each request was there; to the last step if nothing says otherwise."""
  last = len(run.steps) - 1
  first = {e.id: e.after_step + 1 for e in run.events if isinstance(e, Submit)}
  ends = {e.id: e.after_step for e in run.events if isinstance(e, Abort | Finish)}
  return {name: _Stay(step, ends.get(name, last)) for name, step in first.items()}


def _cells(name: str, steps: Sequence[StepRecord], stay: _Stay) -> list[str]:
  """One character a step."""
  cells = [WAITING if stay.first <= i <= stay.last else ABSENT for i in range(len(steps))]
  for number, step in enumerate(steps):
    kinds = [entry.kind for entry in step.requests if entry.id == name]
    if kinds and number <= stay.last:  # what was in flight when it went is for nobody
      cells[number] = PREFILL if "prefill" in kinds else DECODE
    if name in step.preempted:
      cells[number] = PREEMPTED
  return cells


def _columns(cells: Sequence[str], groups: Sequence[range]) -> str:
  return "".join(min((cells[i] for i in group), key=_LOUDEST.index) for group in groups).rstrip()
