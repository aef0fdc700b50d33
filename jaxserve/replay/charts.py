"""The drawings of the report: tokens per step, requests over time, and one stream's gaps."""

import dataclasses
import itertools
from collections.abc import Sequence

from jaxserve.replay import svg
from jaxserve.replay.records import RequestTrace, RunRecord, StepRecord

WIDTH, LEFT, RIGHT = 1120.0, 130.0, 12.0
BAR_TOP, BAR_HEIGHT = 24.0, 170.0
GANTT_HEIGHT, ROW_MIN, ROW_MAX = 420.0, 5.0, 18.0
ITL_TOP, ITL_HEIGHT = 24.0, 250.0
AXIS = 48.0


@dataclasses.dataclass(frozen=True)
class Span:
  """A stretch of time on the run's own clock.

  Attributes:
    start: seconds since the run began.
    end: seconds since the run began.
    kind: of a request's life: "waiting", "prefill" or "decode".
    note: what a tooltip says of it.
  """

  start: float
  end: float
  kind: str = ""
  note: str = ""

  @property
  def ms(self) -> float:
    """Its length in milliseconds."""
    return 1e3 * (self.end - self.start)


def run_chart(run: RunRecord, horizon_s: float) -> str:
  """Tokens of every step above the life of every request, on one time axis.

  Args:
    run: what to draw.
    horizon_s: right end of the time axis, in seconds since the run began; the same for all runs
      that are to be compared by eye.

  Returns:
    an svg element.
  """
  time = _time_scale(horizon_s)
  row = min(ROW_MAX, max(ROW_MIN, GANTT_HEIGHT / max(len(run.requests), 1)))
  top = BAR_TOP + BAR_HEIGHT + 16
  bottom = top + row * len(run.requests)
  return svg.picture(
    WIDTH,
    bottom + AXIS,
    f"{run.name}: tokens per step, and requests over time",
    svg.x_axis(time, BAR_TOP, bottom, "time since the run began (s)"),
    _long_prompt(run, time, bottom),
    _budget_bars(run, time),
    _gantt(run, time, top, row),
  )


def itl_chart(runs: Sequence[RunRecord], stream: str, horizon_s: float) -> str:
  """The gap before every token of one stream, in all runs, on one logarithmic axis.

  Args:
    runs: drawn in the colours run-0, run-1, ...
    stream: id of the request.
    horizon_s: right end of the time axis.

  Returns:
    an svg element.
  """
  time, bottom = _time_scale(horizon_s), ITL_TOP + ITL_HEIGHT
  gaps = [_gaps(run, stream) for run in runs]
  shown = [gap.ms for series in gaps for gap in series if gap.ms > 0]
  low, high = min(shown, default=1.0), max(shown, default=1.0)
  scale = svg.Scale(low * 0.7, high * 1.6, bottom, ITL_TOP, log=True)
  return svg.picture(
    WIDTH,
    bottom + AXIS,
    f"time between the tokens of {stream}",
    svg.x_axis(time, ITL_TOP, bottom, "time since the run began (s)"),
    svg.y_axis(scale, LEFT, WIDTH - RIGHT, "gap before a token (ms, log)"),
    "".join(_arrival(run, time, ITL_TOP, bottom) for run in runs[:1]),
    *(
      _gap_series(series, time, scale, f"run run-{i}")
      for i, series in reversed(list(enumerate(gaps)))
      if series
    ),
  )


def _time_scale(horizon_s: float) -> svg.Scale:
  return svg.Scale(0.0, max(horizon_s, 1e-3), LEFT, WIDTH - RIGHT)


def _arrival(run: RunRecord, time: svg.Scale, top: float, bottom: float) -> str:
  """A line where the long prompt arrives."""
  if run.long_prompt is None:
    return ""
  x = time(run.long_prompt.arrival_s - run.start_s)
  is_late = x > LEFT + 0.6 * (WIDTH - LEFT)
  words = f"a prompt of {run.long_prompt.num_prompt:,} tokens arrives"
  return svg.line(x, top - 18, x, bottom, "arrival") + svg.text(
    x - 6 if is_late else x + 6, top - 9, words, "mark", text_anchor="end" if is_late else "start"
  )


def _long_prompt(run: RunRecord, time: svg.Scale, bottom: float) -> str:
  """The arrival of the long prompt, and a band from there to its first token."""
  request = run.long_prompt
  if request is None:
    return ""
  first_token = next(iter(request.token_times_s), run.end_s)
  left, right = (time(at - run.start_s) for at in (request.arrival_s, first_token))
  band = svg.box(left, BAR_TOP, right - left, bottom - BAR_TOP, "band")
  return band + _arrival(run, time, BAR_TOP, bottom)


def _step_spans(run: RunRecord) -> list[Span]:
  """When each step ran: a step dispatched early begins when the one before it ends."""
  ends = itertools.accumulate((step.end_s for step in run.steps), max, initial=run.start_s)
  return [
    Span(max(step.start_s, end) - run.start_s, max(step.end_s, end) - run.start_s)
    for step, end in zip(run.steps, ends, strict=False)
  ]


def _step_note(step: StepRecord) -> str:
  return (
    f"step {step.step}: {1e3 * (step.end_s - step.start_s):.0f} ms, "
    f"{step.tokens_of('decode')} decode + {step.tokens_of('prefill')} prefill tokens, "
    f"bucket {step.bucket}, budget {step.budget}"
  )


def _budget_bars(run: RunRecord, time: svg.Scale) -> str:
  """One stacked bar a step: decode, prefill, padding; a dashed line at the budget."""
  bottom = BAR_TOP + BAR_HEIGHT
  highest = max([run.budget, *(step.bucket for step in run.steps)])
  tokens = svg.Scale(0.0, highest * 1.1, bottom, BAR_TOP)
  stacks: dict[str, list[svg.Box]] = {"decode": [], "prefill": [], "padding": []}
  hover = []
  for step, span in zip(run.steps, _step_spans(run), strict=True):
    left, width = time(span.start), time(span.end) - time(span.start)
    width = width - 0.6 if width > 3 else max(width, 0.4)  # wide bars stand apart
    counts = (step.tokens_of("decode"), step.tokens_of("prefill"), step.padding)
    base = bottom
    for (kind, stack), count in zip(stacks.items(), counts, strict=True):
      # A few decodes beside thousands of prompt tokens would be less than a pixel high.
      floor = 2.0 if kind == "decode" and count else 0.0
      height = max(bottom - tokens(count), floor)
      stack.append((left, base - height, width, height))
      base -= height
    hover.append(svg.box(left, BAR_TOP, width, BAR_HEIGHT, "hover", _step_note(step)))
  limit = tokens(run.budget)
  return "".join((
    svg.y_axis(tokens, LEFT, WIDTH - RIGHT, "tokens in a step", about=5),
    *(svg.boxes(stack, kind) for kind, stack in stacks.items()),
    svg.line(LEFT, limit, WIDTH - RIGHT, limit, "budget"),
    svg.text(WIDTH - RIGHT, limit - 5, f"budget {run.budget:,}", "mark", text_anchor="end"),
    *hover,
  ))  # fmt: skip


def _lives(run: RunRecord) -> dict[str, list[Span]]:
  """What every request went through: chunks one by one, decodes merged, waits in between."""
  lives: dict[str, list[Span]] = {request.id: [] for request in run.requests}
  arrivals = {request.id: request.arrival_s - run.start_s for request in run.requests}
  last_step: dict[str, int] = {}
  for index, (step, span) in enumerate(zip(run.steps, _step_spans(run), strict=True)):
    for entry in step.requests:
      life = lives[entry.id]
      since = life[-1].end if life else arrivals[entry.id]
      is_next = last_step.get(entry.id) == index - 1 and bool(life)
      last_step[entry.id] = index
      if is_next and entry.kind == "decode" == life[-1].kind:
        life[-1] = dataclasses.replace(life[-1], end=span.end)
        continue
      if not is_next and span.start > since:
        life.append(Span(since, span.start, "waiting", f"waits {span.start - since:.2f} s"))
      note = f"{entry.tokens} prompt tokens in step {step.step}"
      note = note if entry.kind == "prefill" else "decodes"
      life.append(Span(span.start, span.end, entry.kind, note))
  for request in run.requests:
    if not lives[request.id]:
      whole = Span(arrivals[request.id], run.end_s - run.start_s, "waiting", "never served")
      lives[request.id].append(whole)
  return lives


def _gantt(run: RunRecord, time: svg.Scale, top: float, row: float) -> str:
  """One row a request: waiting, prefill chunks, decoding, a tick for every token."""
  lives, ends = _lives(run), {step.step: step.end_s - run.start_s for step in run.steps}
  preempted = [(name, ends[step.step]) for step in run.steps for name in step.preempted]
  rows = []
  for index, request in enumerate(run.requests):
    y = top + index * row
    lost = [at for name, at in preempted if name == request.id]
    rows.append(_gantt_row(request, run.start_s, lives[request.id], lost, time, y, row))
  return "".join(rows)


def _gantt_row(
  request: RequestTrace,
  zero: float,
  life: Sequence[Span],
  preemptions: Sequence[float],
  time: svg.Scale,
  top: float,
  row: float,
) -> str:
  """One request. Its tokens are ticks, so that a stall shows as a stretch without any."""
  inner, height = top + 0.1 * row, 0.8 * row
  spans = (
    svg.box(
      time(span.start), inner, max(time(span.end) - time(span.start), 0.6), height,
      f"life-{span.kind}", f"{request.id}: {span.note}",
    )
    for span in life
  )  # fmt: skip
  ticks = [(time(at - zero) - 0.4, inner, 0.8, height) for at in request.token_times_s]
  crosses = (
    svg.text(time(at), top + 0.8 * row, "×", "preempted", text_anchor="middle")
    for at in preemptions
  )
  name = svg.text(
    LEFT - 8,
    top + 0.5 * row + 4,
    request.id,
    "long name" if request.is_long_prompt else "name",
    text_anchor="end",
  )
  label = name if row >= 10 or request.is_long_prompt else ""
  about = (
    f"{request.id}: {request.num_prompt:,} prompt, {len(request.token_times_s):,} output tokens"
  )
  return svg.element(
    "g", svg.title(about), label, *spans, svg.boxes(ticks, "token"), *crosses, class_="request"
  )


def _gaps(run: RunRecord, stream: str) -> list[Span]:
  """The waits between the tokens of a stream."""
  times = next((request.token_times_s for request in run.requests if request.id == stream), ())
  return [Span(a - run.start_s, b - run.start_s) for a, b in itertools.pairwise(times)]


def _gap_series(series: Sequence[Span], time: svg.Scale, scale: svg.Scale, class_: str) -> str:
  """A stair: every wait as wide and as high as it was, a dot where the token came."""
  path = f"M{time(series[0].start):.1f} {scale(series[0].ms):.1f}" + "".join(
    f"V{scale(gap.ms):.1f}H{time(gap.end):.1f}" for gap in series
  )
  dots = (
    svg.element(
      "circle",
      svg.title(f"{gap.ms:,.1f} ms until {gap.end:.2f} s"),
      cx=time(gap.end), cy=scale(gap.ms), r=2.0,
    )
    for gap in series
  )  # fmt: skip
  worst = max(series, key=lambda gap: gap.ms)
  middle = (time(worst.start) + time(worst.end)) / 2
  label = svg.text(middle, scale(worst.ms) - 8, f"{worst.ms:,.0f} ms", "peak", text_anchor="middle")
  return svg.element("g", svg.element("path", d=path), *dots, label, class_=class_)
