r"""`steps.jsonl`: one or more runs of an engine, complete enough to be executed again.

One JSON object a line, in UTF-8. `event` says what a line is; the first is the header. Times are
seconds on a clock of arbitrary origin, the same for the whole file. Counts are of tokens unless
another unit is said. Requests are named by strings, unique within a run; a run's own name for a
request that brought none is "r" and its number.

  header   schema      "jaxserve.steps"
           version     of this schema, a whole number; see below
           versions    jaxserve, jax, jaxlib and python
           device      platform ("cpu", "gpu"), kind (the device's name), cores (of the machine)
           model       as `--model` takes it
           config      `engine.EngineConfig`: model, scheduler (its cache has num_pages, and
                       page_size in tokens; files without prefix_cache: off), dtype,
                       kv_dtype (auto in files that lack it), attention (the implementation
                       that ran),
                       token_buckets (the bucket table), query_tile, splits (of decodes over work
                       items: capacity, tile and min_keys, the latter two in keys; null: none, as
                       in files that lack it), overlap, decode_steps (1 in files that lack it),
                       eos_token_ids, speculate (the drafter: kind,
                       k, longest, shortest, model; null: none, as in files that lack it)
           seed        of the engine
           params      `types.SchedulerParams` in use when the recording began; watermark in pages;
                       hyper-parameters of the policy as "policy.NAME"
           salt        hex digits of 128 random bits, of the digests of prefix pages
  run      name        for people; a run begins and ends with an idle engine, and begins with an
                       empty prefix cache. Params go on from the run before
           policy      of the scheduler
  params   after_step  see below
           params      in use from the next scheduled step on
  submit   id          of the request
           after_step  see below
           time_s      when it was accepted
           prompt      token ids
           sampling    `engine.SamplingParams`; seed is never null, the engine's choice included
           priority    smaller is more urgent
  abort    id, after_step, time_s
  step     step        number in the run, from 0
           start_s     when it was dispatched; with overlap, perhaps before the last one ended
           end_s       when its outputs were on the host
           budget      most tokens it was allowed
           bucket      tokens that the forward pass computes, padding included
           num_tokens  tokens scheduled
           rows        rows that the head computes, padding included; 0 if no request samples
           requests    who got tokens, in order of service, which is the order of rows: id, tokens,
                       kind ("prefill": a chunk of its prompt; "decode"), start (position of the
                       first of the tokens in the request), new_pages (pages handed out), samples
                       (the step yields its next token), cached (tokens that it found in the prefix
                       cache, in the step that admitted it), drafts (how many of the tokens, the
                       last ones, are drafts) and accepted (of these); 0 in files that lack them
           admitted    ids that entered the running set
           preempted   ids that left it and lost their pages
           outputs     sampled tokens in order of service: id, token. Requests that were gone when
                       the step was read have none
           logits      the first 16 hex digits of the SHA-256 over all outputs of: top_ids (i32),
                       top_logits (f32), logprob (f32), little-endian; null without outputs
           evicted     pages whose cached content was lost to a request of this step
  finish   id          of the request
           after_step  the step that brought its last token
           reason      "stop" or "length"
  end      steps       of the run. A run without this line was cut off

`after_step` is the number of the last step line before, -1 if there is none. With overlap one more
step has been dispatched by then. What happens between two steps is in the order of the lines; a
step line stands for one call of `Engine.step`, so feeding submits, aborts and params at their lines
and calling `step` at its line repeats the run, overlap included.

Versions: a field that readers may leave out of account can be added with a default and does not
change the version; readers pass over fields that they do not know. Anything else (a field that a
replay needs, another meaning, unit, name or order) raises it. Readers refuse any version but their
own: a replay that ignored half of a run would be worth nothing.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from jaxserve.engine import EngineConfig, SamplingParams
from jaxserve.replay.codec import RecordingError, from_plain, to_plain
from jaxserve.replay.records import RequestTrace, RunRecord, StepRecord

SCHEMA = "jaxserve.steps"
VERSION = 1
Params = Mapping[str, int | bool | float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
  """Where the model ran; see the module's docstring, as for all records below."""

  platform: str
  kind: str
  cores: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
  """The first line."""

  schema: str = SCHEMA
  version: int = VERSION
  versions: Mapping[str, str]
  device: Device
  model: str
  config: EngineConfig
  seed: int
  params: Params
  salt: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStart:
  """A run begins."""

  name: str
  policy: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamsChange:
  """`Engine.set_params`."""

  after_step: int
  params: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submit:
  """`Engine.submit`."""

  id: str
  after_step: int
  time_s: float
  prompt: Sequence[int]
  sampling: SamplingParams
  priority: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Abort:
  """`Engine.abort`."""

  id: str
  after_step: int
  time_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finish:
  """A request ended by itself."""

  id: str
  after_step: int
  reason: Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEnd:
  """The run ended with an idle engine."""

  steps: int


RunEvent = Submit | Abort | ParamsChange | StepRecord | Finish
Event = Header | RunStart | RunEvent | RunEnd
KINDS: dict[str, type] = {
  "header": Header, "run": RunStart, "params": ParamsChange, "submit": Submit, "abort": Abort,
  "step": StepRecord, "finish": Finish, "end": RunEnd,
}  # fmt: skip
_NAMES = {cls: name for name, cls in KINDS.items()}


def kind_of(event: Event) -> str:
  """The value of `event` in its line."""
  return _NAMES[type(event)]


def to_line(event: Event) -> str:
  """The line of an event, with its newline."""
  document = {"event": kind_of(event)} | to_plain(event)
  return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """One run of a recording.

  Attributes:
    name: for people.
    policy: of the scheduler.
    params: in use when the first step was scheduled.
    events: in order, without run, end, and params that were set before anything else.
    complete: False if the recording stopped before the run did.
  """

  name: str
  policy: str
  params: Params
  events: Sequence[RunEvent]
  complete: bool

  @property
  def steps(self) -> Sequence[StepRecord]:
    """Its steps, in order."""
    return [event for event in self.events if isinstance(event, StepRecord)]

  @property
  def tokens(self) -> dict[str, list[int]]:
    """Output tokens by request, in order of submit."""
    tokens: dict[str, list[int]] = {e.id: [] for e in self.events if isinstance(e, Submit)}
    for step in self.steps:
      for output in step.outputs:
        tokens[output.id].append(output.token)
    return tokens

  def record(self) -> RunRecord:
    """The run as the report draws it; no request is marked as the one that is studied."""
    times: dict[str, list[float]] = {name: [] for name in self.tokens}
    for step in self.steps:
      for output in step.outputs:
        times[output.id].append(step.end_s)
    reasons: dict[str, str] = {e.id: e.reason for e in self.events if isinstance(e, Finish)}
    reasons |= {e.id: "abort" for e in self.events if isinstance(e, Abort)}
    return RunRecord(
      name=self.name,
      policy=self.policy,
      budget=int(self.params["budget"]),
      chunked_prefill=bool(self.params["chunked_prefill"]),
      steps=self.steps,
      requests=[
        RequestTrace(
          id=event.id,
          arrival_s=event.time_s,
          token_times_s=times[event.id],
          num_prompt=len(event.prompt),
          finish_reason=reasons.get(event.id),
        )
        for event in self.events
        if isinstance(event, Submit)
      ],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
  """A file of this schema.

  Attributes:
    header: its first line.
    runs: in order.
    notes: what is wrong with it and can be lived with, for people.
  """

  header: Header
  runs: Sequence[Run]
  notes: Sequence[str]


def read(path: pathlib.Path) -> Recording:
  """Reads a file.

  Raises:
    RecordingError: naming the line and what to do. A last line that was cut off is not an error
      but a note.
  """
  try:
    return parse(path.read_text("utf-8"))
  except (OSError, UnicodeDecodeError) as error:
    raise RecordingError(f"cannot read it: {error}") from error


def parse(text: str) -> Recording:
  """`read`, from the file's text."""
  documents, notes = _documents(text)
  if not documents:
    raise RecordingError("it has no complete line; record the run again")
  header = _header(documents[0])
  events = [_event(number, doc) for number, doc in enumerate(documents[1:], 2)]
  runs = _runs(header, events)
  notes += [
    f"run {run.name!r} has no end line: the recording stopped after step {len(run.steps) - 1}"
    for run in runs
    if not run.complete
  ]
  return Recording(header=header, runs=runs, notes=notes)


def _documents(text: str) -> tuple[list[dict[str, Any]], list[str]]:
  documents: list[dict[str, Any]] = []
  lines = text.split("\n")  # not splitlines: it would also split at characters inside strings
  for number, line in enumerate(lines, 1):
    if not line and number == len(lines):
      break
    try:
      document = json.loads(line)
    except json.JSONDecodeError as error:
      if number == len(lines):  # without its newline: writing was interrupted
        note = f"line {number} was cut off after {len(line)} characters; it is left out"
        return documents, [note]
      raise RecordingError(
        f"line {number}: not JSON ({error}); restore the line or record the run again"
      ) from error
    if not isinstance(document, dict):
      raise RecordingError(f"line {number}: must be a JSON object; record the run again")
    documents.append(document)
  return documents, []


def _header(document: Mapping[str, Any]) -> Header:
  found, version = document.get("schema"), document.get("version")
  if document.get("event") != "header" or found != SCHEMA:
    raise RecordingError(
      f"line 1: schema={found!r}: must be the header of a {SCHEMA!r} file, as `python -m "
      "jaxserve.main` writes to steps.jsonl"
    )
  if version != VERSION:
    writer = (document.get("versions") or {}).get("jaxserve", "unknown")
    raise RecordingError(
      f"line 1: version={version!r}: this jaxserve reads version {VERSION} of {SCHEMA}; use the "
      f"jaxserve that wrote it ({writer}), or record the run again"
    )
  header: Header = from_plain(Header, document, "line 1: header")
  return header


def _event(number: int, document: Mapping[str, Any]) -> tuple[int, Event]:
  kind = document.get("event")
  if kind not in KINDS or kind == "header":
    known = ", ".join(name for name in KINDS if name != "header")
    raise RecordingError(f"line {number}: event={kind!r}: must be one of {known}")
  return number, from_plain(KINDS[kind], document, f"line {number}: {kind}")


def _runs(header: Header, events: Iterable[tuple[int, Event]]) -> list[Run]:
  runs: list[Run] = []
  params = header.params
  current: list[RunEvent] | None = None
  steps, names = 0, set[str]()
  for number, event in events:
    if isinstance(event, RunStart):
      current, steps, names = [], 0, set()
      runs.append(
        Run(name=event.name, policy=event.policy, params=params, events=current, complete=False)
      )
      continue
    if current is None:
      raise RecordingError(f"line {number}: {kind_of(event)!r} outside of a run; add a run line")
    _check_place(number, event, steps)
    _check_names(number, event, names)
    if isinstance(event, RunEnd):
      runs[-1], current = dataclasses.replace(runs[-1], complete=True), None
      continue
    assert not isinstance(event, Header), "_event refuses it"
    if isinstance(event, ParamsChange):
      params = event.params
      if not current:
        runs[-1] = dataclasses.replace(runs[-1], params=params)
        continue
    steps += isinstance(event, StepRecord)
    current.append(event)
  return runs


def _check_names(number: int, event: Event, names: set[str]) -> None:
  """Only requests that were submitted before may be named; a submit adds its own to `names`."""
  if isinstance(event, Submit):
    if event.id in names:
      raise RecordingError(f"line {number}: submit.id={event.id!r}: this run has it already")
    names.add(event.id)
  used = [event.id] if isinstance(event, Abort | Finish) else []
  if isinstance(event, StepRecord):
    used = [part.id for part in event.requests] + [output.id for output in event.outputs]
    used += [*event.preempted, *event.admitted]
  if odd := next((name for name in used if name not in names), None):
    raise RecordingError(
      f"line {number}: {kind_of(event)} names the request {odd!r}, which no submit line before "
      "has; record the run again"
    )


def _check_place(number: int, event: Event, steps: int) -> None:
  """Every line must say the same of its place in the run as the lines before it."""
  field, found, expected = "after_step", getattr(event, "after_step", steps - 1), steps - 1
  if isinstance(event, StepRecord):
    field, found, expected = "step", event.step, steps
  if isinstance(event, RunEnd):
    field, found, expected = "steps", event.steps, steps
  if found != expected:
    raise RecordingError(
      f"line {number}: {kind_of(event)}.{field}={found}: the lines before make it {expected}; "
      "a line was lost, added or moved: record the run again"
    )
