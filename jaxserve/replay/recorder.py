"""Writes down a run of an engine while it happens; see `recording` for what is kept."""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

import jaxserve
from jaxserve.engine import Engine, SamplingParams, StepEvents, clock
from jaxserve.engine.config import bucket_for
from jaxserve.engine.request import TokenEvent
from jaxserve.replay import recording
from jaxserve.replay.codec import from_plain, to_plain
from jaxserve.replay.records import StepRecord, StepRequest, StepToken
from jaxserve.types import SchedulerParams

_SALT_BYTES = 16
_DIGEST_CHARS = 16

Sink = Callable[[recording.Event], object]


class Recorder:
  """Listens to one engine during `run` and hands every event on, the header first."""

  def __init__(self, engine: Engine, model: str, sink: Sink, salt: str | None = None):
    """Hands on the header.

    Args:
      engine: to listen to.
      model: what `--model` loads the same weights from.
      sink: called with every event, between two steps: it should not take long.
      salt: hex digits, of the digests of pages; None: that of the engine, if it has a prefix cache,
        or one drawn anew.
    """
    self.engine = engine
    own = engine.salt.hex() if engine.config.scheduler.prefix_cache else ""
    salt = salt or own or secrets.token_hex(_SALT_BYTES)
    self.header = make_header(engine, model, salt)
    self.last_step: StepRecord | None = None
    self._sink = sink
    self._params = self.header.params
    self._names: dict[int, str] = {}  # by the engine's request id
    self._ids: dict[str, int] = {}
    self._next_name: str | None = None
    self._num_steps = 0
    sink(self.header)

  @contextlib.contextmanager
  def run(self, name: str, policy: str) -> Iterator[None]:
    """Records what the engine does until the block ends, from an empty prefix cache on.

    The end line is left out if the engine is not idle by then.

    Raises:
      RuntimeError: the engine is not idle, or is being listened to.
    """
    if not self.engine.is_idle:
      raise RuntimeError("a recording starts on an idle engine: let it finish its requests first")
    if self.engine.listener is not None:
      raise RuntimeError("the engine has a listener already: end its run first")
    self._names, self._ids, self._num_steps = {}, {}, 0
    self.engine.reset_prefix_cache(bytes.fromhex(self.header.salt))
    self._sink(recording.RunStart(name=name, policy=policy))
    if plain_params(self.engine.params) != self._params:
      self.on_params(self.engine.params)
    self.engine.listener = self
    try:
      yield
    finally:
      self.engine.listener = None
    if self.engine.is_idle:
      self._sink(recording.RunEnd(steps=self._num_steps))

  def submit(
    self,
    name: str,
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    priority: int = 0,
  ) -> int:
    """`Engine.submit` of a request with a name of its own.

    Raises:
      ValueError: the name is taken, or as `Engine.submit`.
      QueueFullError: as `Engine.submit`.
    """
    if name in self._ids:
      raise ValueError(f"name={name!r}: a request of this run has it; choose another")
    self._next_name = name
    try:
      return self.engine.submit(prompt, sampling, priority=priority)
    finally:
      self._next_name = None

  def abort(self, name: str) -> bool:
    """`Engine.abort` by name; False if there is no such request any more."""
    return name in self._ids and self.engine.abort(self._ids[name]) is not None

  def on_submit(
    self, request_id: int, prompt: tuple[int, ...], sampling: SamplingParams, priority: int
  ) -> None:
    """See `engine.Listener`."""
    name = self._next_name or f"r{len(self._names)}"
    self._names[request_id], self._ids[name] = name, request_id
    self._sink(
      recording.Submit(
        id=name,
        after_step=self._num_steps - 1,
        time_s=clock.now(),
        prompt=tuple(int(token) for token in prompt),
        sampling=sampling,
        priority=priority,
      )
    )

  def on_abort(self, request_id: int) -> None:
    """See `engine.Listener`."""
    name, after = self._names[request_id], self._num_steps - 1
    self._sink(recording.Abort(id=name, after_step=after, time_s=clock.now()))

  def on_params(self, params: SchedulerParams) -> None:
    """See `engine.Listener`."""
    self._params = plain_params(params)
    self._sink(recording.ParamsChange(after_step=self._num_steps - 1, params=self._params))

  def on_step(self, events: StepEvents) -> None:
    """See `engine.Listener`."""
    self.last_step = self._step(events)
    self._sink(self.last_step)
    for event in events.outputs:
      if event.finish_reason in ("stop", "length"):
        self._sink(
          recording.Finish(
            id=self._names[event.request_id],
            after_step=self._num_steps,
            reason="stop" if event.finish_reason == "stop" else "length",
          )
        )
    self._num_steps += 1

  def _step(self, events: StepEvents) -> StepRecord:
    names, samples = self._names, any(part.samples for part in events.scheduled)
    return StepRecord(
      step=self._num_steps,
      start_s=events.dispatched_s,
      end_s=events.done_s,
      budget=events.budget,
      bucket=events.bucket,
      num_tokens=events.num_tokens,
      requests=tuple(
        StepRequest(
          id=names[part.request_id],
          tokens=part.tokens,
          kind="prefill" if part.is_prefill else "decode",
          start=part.start,
          new_pages=part.new_pages,
          samples=part.samples,
          cached=part.cached,
          drafts=part.drafts,
          accepted=part.accepted,
        )
        for part in events.scheduled
      ),
      preempted=tuple(names[request_id] for request_id in events.preempted),
      admitted=tuple(names[request_id] for request_id in events.admitted),
      rows=bucket_for(events.num_places, self.engine.config.rows) if samples else 0,
      outputs=tuple(StepToken(id=names[e.request_id], token=e.token) for e in events.outputs),
      logits=logits_digest(events.outputs),
      evicted=events.evicted,
    )


def logits_digest(outputs: Sequence[TokenEvent]) -> str | None:
  """Digest of what the model said of the outputs of a step, as `recording` defines it."""
  if not outputs:
    return None
  digest = hashlib.sha256()
  for event in outputs:
    count = len(event.top_ids)
    digest.update(struct.pack(f"<{count}i", *event.top_ids))
    digest.update(struct.pack(f"<{count}ff", *event.top_logits, event.logprob))
  return digest.hexdigest()[:_DIGEST_CHARS]


def make_header(engine: Engine, model: str, salt: str) -> recording.Header:
  """The header of a recording that begins now."""
  # Written out, so that a later default cannot change what the file means.
  config = to_plain(engine.config) | {"token_buckets": list(engine.config.buckets)}
  return recording.Header(
    versions=versions(),
    device=device(),
    model=model,
    config=from_plain(type(engine.config), config, "config"),
    seed=engine.seed,
    params=plain_params(engine.params),
    salt=salt,
  )


def plain_params(params: SchedulerParams) -> dict[str, int | bool | float]:
  """Scheduler parameters as numbers."""
  flat = {name: value for name, value in vars(params).items() if name != "policy"}
  flat |= {f"policy.{name}": value for name, value in params.policy.items()}
  return {name: np.asarray(value).item() for name, value in flat.items()}


def versions() -> dict[str, str]:
  """What computes: jaxserve, jax, jaxlib, python."""
  return {
    "jaxserve": jaxserve.__version__,
    "jax": jax.__version__,
    "jaxlib": importlib.metadata.version("jaxlib"),
    "python": platform.python_version(),
  }


def device() -> recording.Device:
  """The model's device; a CPU by the name that the system has for it."""
  model = jax.devices()[0]
  kind = _cpu_name() if model.platform == "cpu" else model.device_kind
  return recording.Device(platform=model.platform, kind=kind, cores=os.cpu_count() or 0)


def _cpu_name() -> str:
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    lines = []
  names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
  return next(names, platform.processor() or platform.machine())
