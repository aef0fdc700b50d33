"""Executes a recording again and holds every line against what comes out."""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxserve import sched
from jaxserve.config import SchedulerConfig
from jaxserve.engine import Engine, QueueFullError, drafting
from jaxserve.engine.store import ExecutableStore
from jaxserve.model import llama, source
from jaxserve.pytree import scalar
from jaxserve.replay import recording
from jaxserve.replay.codec import RecordingError, to_plain
from jaxserve.replay.differences import (
  MISSING,
  Difference,
  event_difference,
  first_field,
)
from jaxserve.replay.recorder import Recorder, device, plain_params, versions
from jaxserve.replay.records import StepRecord
from jaxserve.types import SchedulerParams


def cautions(header: recording.Header) -> list[str]:
  """Why a replay on this machine may differ in bits, one reason a line; empty if there is none."""
  here = {"versions": versions(), "device": to_plain(device())}
  there = {"versions": dict(header.versions), "device": to_plain(header.device)}
  return [
    f"{group}.{name}={there[group].get(name)!r} in the recording, {here[group][name]!r} here: "
    "bitwise equality is not promised"
    for group in here
    for name in here[group]
    if there[group].get(name) != here[group][name]
  ]


def build_engine(header: recording.Header, cache_dir: pathlib.Path) -> Engine:
  """The engine of a recording, from its model and its compiled shapes on.

  Args:
    header: of the recording.
    cache_dir: converted models and compiled executables.

  Raises:
    RecordingError: the model is another one than was recorded, or this device cannot do the
      attention that was.
    ValueError: the model cannot be loaded, or the config is out of range.
  """
  store = ExecutableStore(cache_dir / "executables")
  config = header.config
  checkpoint = source.load_checkpoint(header.model, cache_dir, config.dtype)
  model = checkpoint.config.for_context(config.scheduler.max_model_len)
  found = first_field(to_plain(config.model), to_plain(model))
  if found:
    raise RecordingError(
      f"model={header.model!r}: {found[0]} is {found[2]}, in the recording it was {found[1]}; give "
      "the model that was recorded"
    )
  graphdef, leaves = llama.load(model, checkpoint.params, jnp.dtype(config.dtype), config.quantize)
  params = make_params(header.params, config.scheduler)
  draft = drafting.load(config.speculate, checkpoint, cache_dir, config.dtype)
  try:
    salt, weights = bytes.fromhex(header.salt), draft and draft.weights
    return Engine.build(config, graphdef, leaves, params, header.seed, store, salt, weights)
  except NotImplementedError as error:
    raise RecordingError(f"config.{error}; replay it on a device like the recorded one") from error


def make_params(params: recording.Params, config: SchedulerConfig) -> SchedulerParams:
  """Scheduler parameters from plain numbers.

  Raises:
    RecordingError: a parameter is missing, unknown, or above what the config has shapes for.
  """
  like = sched.make_params(config)
  odd = sorted(plain_params(like).keys() ^ params.keys())
  if odd:
    raise RecordingError(f"params: {odd} are not in both the recording and this jaxserve's params")
  for name, limit in (("budget", config.max_budget), ("max_num_seqs", config.max_num_seqs)):
    if not 1 <= params[name] <= limit:
      raise RecordingError(f"params.{name}={params[name]}: must be in [1, {limit}]")
  hyper = {name: scalar(params[f"policy.{name}"], np.float32) for name in like.policy}
  numbers = {
    name: scalar(params[name], np.asarray(value).dtype.type)
    for name, value in vars(like).items() if name != "policy"
  }  # fmt: skip
  return SchedulerParams(policy=hyper, **numbers)


def check_config(recorded: recording.Header, engine: Engine) -> None:
  """Refuses an engine that was built for other shapes than the recorded one."""
  built = to_plain(engine.config) | {"token_buckets": list(engine.config.buckets)}
  found = first_field(to_plain(recorded.config), built, "config")
  if found:
    raise RecordingError(f"{found[0]}={found[1]} in the recording, {found[2]} in the engine given")


def replay(record: recording.Recording, engine: Engine) -> Difference | None:
  """Runs a whole recording again.

  Args:
    record: what to repeat.
    engine: idle, of the same config; left idle, with its parameters as they were.

  Returns:
    The first difference (recorded, then found), or None if every plan, token and digest is the
    same, bit by bit.

  Raises:
    RecordingError: the engine does not fit the recording.
  """
  check_config(record.header, engine)
  before, policy = engine.params, engine.config.scheduler.policy
  try:
    return next(filter(None, (replay_run(record, run, engine) for run in record.runs)), None)
  finally:
    if engine.is_idle:
      engine.set_policy(policy, before)


def replay_run(
  record: recording.Recording, run: recording.Run, engine: Engine
) -> Difference | None:
  """`replay` of one run; leaves its last parameters set."""
  scheduler = dataclasses.replace(engine.config.scheduler, policy=run.policy)
  engine.set_policy(run.policy, make_params(run.params, scheduler))
  events: list[recording.Event] = []
  recorder = Recorder(engine, record.header.model, events.append, record.header.salt)
  with recorder.run(run.name, run.policy):
    first = len(events)  # header and run
    difference = _follow(run, recorder, events, first)
  _drain(engine, run, recorder)
  return difference


def _follow(
  run: recording.Run, recorder: Recorder, events: Sequence[recording.Event], first: int
) -> Difference | None:
  step = 0
  for number, expected in enumerate(run.events):
    refused = _act(expected, recorder)
    if refused:
      label = f"{recording.kind_of(expected)} {getattr(expected, 'id', '')!r}"
      return Difference(step=step, field=label, left="accepted", right=refused)
    found = events[first + number] if first + number < len(events) else None
    assert not isinstance(found, recording.Header | recording.RunStart | recording.RunEnd)
    difference = event_difference(expected, found, step)
    if difference:
      return difference
    step += isinstance(expected, StepRecord)
  if run.complete and (len(events) > first + len(run.events) or not recorder.engine.is_idle):
    return Difference(step=step, field="event", left=MISSING, right="the engine goes on")
  return None


def _act(event: recording.RunEvent, recorder: Recorder) -> str | None:
  """Does to the engine what the event says was done; why it refused, or None."""
  engine = recorder.engine
  try:
    if isinstance(event, recording.Submit):
      recorder.submit(event.id, event.prompt, event.sampling, priority=event.priority)
    elif isinstance(event, recording.Abort):
      recorder.abort(event.id)
    elif isinstance(event, recording.ParamsChange):
      engine.set_params(make_params(event.params, engine.config.scheduler))
    elif isinstance(event, StepRecord):
      engine.step()
  except (ValueError, QueueFullError, RuntimeError) as error:
    return str(error)
  return None


def _drain(engine: Engine, run: recording.Run, recorder: Recorder) -> None:
  """Leaves the engine idle whatever the recording left in it."""
  for event in run.events:
    if isinstance(event, recording.Submit):
      recorder.abort(event.id)
  while not engine.is_idle:
    engine.step()
