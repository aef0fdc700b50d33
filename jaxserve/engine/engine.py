"""The step loop: schedule, lay out, dispatch; read the outputs one step later; commit."""

import collections
import dataclasses
from collections.abc import Hashable, Sequence

import jax
import numpy as np
from flax import nnx

from jaxserve import sched
from jaxserve.cache import PageChain
from jaxserve.engine import (
  attention,
  clock,
  compiler,
  devices,
  drafting,
  programs,
)
from jaxserve.engine.config import EngineConfig, bucket_for
from jaxserve.engine.drafting import DraftModel
from jaxserve.engine.executables import CompileGuard, CompileReport, ExecutableTable
from jaxserve.engine.in_flight import InFlight, scheduled_parts
from jaxserve.engine.model_runner import ModelRunner
from jaxserve.engine.prefix import NO_SALT, PageDigests, PrefixStats
from jaxserve.engine.request import (
  Completion,
  Constraint,
  FinishReason,
  Listener,
  Request,
  SamplingParams,
  StepEvents,
  TokenEvent,
  check_token_ids,
  completion,
)
from jaxserve.engine.sampling_row import MAX_SEED
from jaxserve.engine.store import ExecutableStore
from jaxserve.pytree import unpack
from jaxserve.sched import packing
from jaxserve.types import SchedulerParams, cut_plan


class QueueFullError(RuntimeError):
  """All request slots are taken; try again when some request has finished."""


class Engine:
  """Serves requests on one model. Not thread-safe: one thread submits, aborts and steps."""

  def __init__(
    self,
    config: EngineConfig,
    leaves: tuple[jax.Array, ...],
    table: ExecutableTable,
    where: devices.Devices,
    params: SchedulerParams,
    seed: int = 0,
    salt: bytes = NO_SALT,
    draft: DraftModel | None = None,
  ):
    self.config, self.seed, self.salt = config, seed, salt
    self.prefix_stats = PrefixStats()
    self.listener: Listener | None = None  # told of everything that happens
    self.guard = CompileGuard()
    self._table, self._devices = table, where
    self._rng = np.random.default_rng(seed)
    self._runner = ModelRunner(config, leaves, table, where.model, draft)
    self._schedulers = {shapes.policy: shapes for shapes in config.schedulers}
    for shapes in config.schedulers:
      packing.small_like(shapes)  # traces, so before the guard starts
    self._decisions_like = {
      policy: packing.decision_like(shapes) for policy, shapes in self._schedulers.items()
    }
    self._requests: dict[int, Request] = {}  # by slot
    self._slots: dict[int, int] = {}  # request id -> slot
    self._in_flight: collections.deque[InFlight] = collections.deque()
    self._unreported: tuple[int, ...] = ()  # preempted by a step that computed nothing
    self._drafts_wait = False  # the last step read brought drafts
    self._next_id = self._num_steps = 0
    self.set_policy(config.scheduler.policy, params)
    table.seal()
    self.guard.start()

  @classmethod
  def build(
    cls,
    config: EngineConfig,
    graphdef: nnx.GraphDef,
    leaves: tuple[jax.Array, ...],
    params: SchedulerParams | None = None,
    seed: int = 0,
    store: ExecutableStore | None = None,
    salt: bytes = NO_SALT,
    draft: drafting.Weights | None = None,
  ) -> "Engine":
    """Compiles everything the engine will ever run, then seals the table.

    Args:
      config: what to compile for.
      graphdef: from `jaxserve.model.llama.load`.
      leaves: weights, from the same call.
      params: scheduler parameters; None: the defaults of `sched.make_params`.
      seed: of the engine; picks the seeds of requests that bring none.
      store: executables of earlier starts.
      salt: of page digests; random where strangers send requests. Processes of one salt agree on
        digests.
      draft: the model of config.draft_model.

    Raises:
      RuntimeError: if an executable would copy the KV cache instead of updating it in place.
      NotImplementedError: if the device cannot do the attention that is asked for.
    """
    where = devices.pick()
    config = attention.resolve(config, where.model)
    table = compiler.compile_all(cls.programs(config, graphdef, leaves, draft), store=store)
    platform = where.model.platform
    drafter = drafting.DraftModel(config, draft, table, platform) if draft else None
    params = sched.make_params(config.scheduler) if params is None else params
    engine = cls(config, leaves, table, where, params, seed, salt, drafter)
    drafts = drafter.kv_bytes if drafter else 0
    table.check_in_place({"forward": engine.kv_bytes, "follow": drafts, "draft": drafts})
    return engine

  @staticmethod
  def programs(
    config: EngineConfig,
    graphdef: nnx.GraphDef,
    leaves: programs.Leaves,
    draft: drafting.Weights | None = None,
  ) -> list[programs.Program]:
    """What `build` compiles for the same arguments, of which shapes and dtypes are enough."""
    where = devices.pick()
    config = attention.resolve(config, where.model)
    return [
      *programs.model_programs(config, graphdef, leaves, where),
      *programs.scheduler_programs(config, where),
      *(drafting.programs(config, draft, where) if draft else ()),
    ]

  @property
  def kv_bytes(self) -> int:
    """Size of the KV pool, that of a draft model left out."""
    return self._runner.kv_bytes

  @property
  def compile_reports(self) -> tuple[CompileReport, ...]:
    """One per executable."""
    return self._table.reports

  @property
  def retraces(self) -> int:
    """Traces and compiles since the table was sealed; 0 unless something is wrong."""
    return self.guard.count

  @property
  def params(self) -> SchedulerParams:
    """Scheduler parameters in use."""
    return self._params

  @property
  def policy(self) -> Hashable:
    """Scheduling policy in use."""
    return self.config.scheduler.policy

  @property
  def num_requests(self) -> int:
    """Accepted requests that have not finished."""
    return len(self._requests)

  @property
  def is_idle(self) -> bool:
    """No request, and no step whose outputs are still to be read."""
    return not self._requests and not self._in_flight

  @property
  def num_free_pages(self) -> int:
    """Pages that nobody holds."""
    numbers = np.asarray(self._state.numbers)
    return int(packing.small_fields(numbers, self.config.scheduler).pool.num_free)

  def set_params(self, params: SchedulerParams) -> None:
    """Changes budget, seats or threshold from the next scheduled step on; nothing recompiles."""
    self._params = params
    self._placed_params = jax.device_put(packing.pack_params(params), self._devices.scheduler)
    if self.listener:
      self.listener.on_params(params)

  def set_policy(self, policy: Hashable, params: SchedulerParams) -> None:
    """Changes the scheduling policy of an idle engine; nothing recompiles.

    Args:
      policy: scheduler.policy of the config, or one of its other_policies.
      params: scheduler parameters, with the hyper-parameters of that policy.

    Raises:
      RuntimeError: requests are being served.
      ValueError: the engine was not built for that policy.
    """
    if not self.is_idle:
      raise RuntimeError(f"{len(self._requests)} requests are being served: change policy before")
    if policy not in self._schedulers:
      built = ", ".join(map(str, self._schedulers))
      raise ValueError(f"policy={policy!r}: the engine was built for {built}")
    kept = tuple(p for p in self._schedulers if p != policy and isinstance(p, str))
    self.config = dataclasses.replace(
      self.config, scheduler=self._schedulers[policy], other_policies=kept
    )
    self._state = self._table["init", policy](np.int32(0))
    self.reset_prefix_cache()
    self.set_params(params)

  def reset_prefix_cache(self, salt: bytes | None = None) -> None:
    """Forgets what pages hold; the engine must be idle.

    Args:
      salt: of digests from now on; None: the same as before.

    Raises:
      RuntimeError: requests are being served.
    """
    if not self.is_idle:
      raise RuntimeError(f"{len(self._requests)} requests are being served: reset the cache before")
    self.salt = self.salt if salt is None else salt
    self._digests = None
    if self.config.scheduler.prefix_cache:
      self._digests = PageDigests(self.config.scheduler, self.salt)
      self._state = self._table["init", self.policy](np.int32(0))

  def check(self, prompt: Sequence[int], sampling: SamplingParams, priority: int = 0) -> None:
    """Raises the ValueError with which `submit` would refuse this; any thread may ask."""
    config, vocab_size = self.config.scheduler, self.config.model.vocab_size
    sched.check_request(config, self._params, len(prompt), sampling.max_tokens)
    check_token_ids(prompt, vocab_size)
    sampling.check(vocab_size, self.config.eos_token_ids)
    if sampling.prompt_logprobs is not None and not self.config.score_prompts:
      raise ValueError(
        f"prompt_logprobs={sampling.prompt_logprobs}: this engine was built without score_prompts"
      )
    if priority and config.ordering != "priority":
      raise ValueError(f'priority={priority}: the scheduler orders by arrival; use "priority"')

  def submit(
    self,
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    priority: int = 0,
    constraint: Constraint | None = None,
  ) -> int:
    """Accepts a request; it is scheduled from the next step on.

    Args:
      prompt: token ids.
      sampling: options; None: 16 greedy tokens.
      priority: smaller is more urgent; needs ordering="priority".
      constraint: decides which tokens may come; such a request is never dispatched ahead of its
        last token, and a recording of it cannot be replayed.

    Returns:
      The request id.

    Raises:
      ValueError: the request could never be served; the message names the field.
      QueueFullError: all slots are taken.
    """
    sampling = sampling or SamplingParams()
    config = self.config.scheduler
    self.check(prompt, sampling, priority)
    limit = sched.request_limit(config, len(prompt), sampling.max_tokens)
    chain, reuse = self._digests.of_prompt(prompt, sampling) if self._digests else (None, ())
    self._state, slot_array = self._table["submit", self.policy](
      self._state, np.int32(len(prompt)), np.int32(limit), np.int32(priority),
      np.bool_(constraint is not None), *reuse,
    )  # fmt: skip
    slot = int(slot_array)
    if slot == config.max_requests:
      raise QueueFullError(f"all {config.max_requests} request slots are taken; try again later")
    if sampling.seed is None:
      sampling = dataclasses.replace(sampling, seed=int(self._rng.integers(MAX_SEED)))
    request = self._remember(slot, prompt, sampling, constraint, chain)
    self._runner.upload(request)
    if self.listener:
      self.listener.on_submit(request.id, request.prompt, sampling, priority)
    return request.id

  def abort(self, request_id: int) -> Completion | None:
    """Ends a request now, whatever its state; its pages are free at once.

    Returns:
      What it had produced, or None if the id is unknown or already finished.
    """
    slot = self._slots.pop(request_id, None)
    if slot is None:
      return None
    self._state = self._table["abort", self.policy](self._state, self._mask([slot]))
    if self.listener:
      self.listener.on_abort(request_id)
    return completion(self._requests.pop(slot), "abort")

  def step(self) -> StepEvents | None:
    """Keeps the device one step ahead and returns the oldest unread step, or None when idle.

    With overlap, step n + 1 is dispatched before the outputs of step n are read here.
    """
    # Drafts are for who is known to be there: while there are some, nothing is dispatched ahead.
    depth = 1 if self.config.overlap and not self._drafts_wait else 0
    while len(self._in_flight) <= depth and self._requests:
      # With nothing in flight, a policy may still sit some steps out.
      if not any(self._dispatch() for _ in range(1 if self._in_flight else sched.MOST_IDLE_STEPS)):
        break
    if self._in_flight:
      events = self._collect()
      if self.listener:
        self.listener.on_step(events)
      return events
    if self._requests:
      raise RuntimeError(f"{len(self._requests)} requests wait and no step can serve any of them")
    return None

  def generate(
    self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None
  ) -> list[Completion]:
    """Runs prompts to their end, as many at once as fit, and returns them in order."""
    waiting = collections.deque(enumerate(prompts))
    numbers: dict[int, int] = {}
    done: dict[int, Completion] = {}
    while len(done) < len(prompts):
      while waiting and len(self._requests) < self.config.scheduler.max_requests:
        number, prompt = waiting.popleft()
        numbers[self.submit(prompt, sampling)] = number
      requests = {r.id: r for r in self._requests.values()}
      events = self.step()
      for event in events.outputs if events else ():
        if event.finish_reason and event.request_id in numbers:
          done[numbers[event.request_id]] = completion(
            requests[event.request_id], event.finish_reason
          )
    return [done[number] for number in range(len(prompts))]

  def warm_up(self, most_tokens: int | None = None) -> None:
    """Runs the executables once on an empty step, so that no request meets a first call.

    XLA:CPU sets up its matrix kernels at the first call of an executable: 0.2 to 0.5 s a bucket,
    which would look like a stall. The engine must be idle.

    Args:
      most_tokens: leave out token buckets above the one that holds so many; None: all.
    """
    if not self.is_idle:
      raise RuntimeError(f"{len(self._requests)} requests are being served: warm up before")
    buckets = self.config.buckets
    largest = buckets[-1] if most_tokens is None else bucket_for(most_tokens, buckets)
    self._state, empty = self._table["schedule", self.policy](self._state, self._placed_params)
    small = self._small_plan(empty)
    for bucket in (b for b in buckets if b <= largest):
      self._runner.run(self._plan(empty, bucket), small, bucket, 0, any_samples=False)
    for rows in self.config.rows:
      plan = self._plan(empty, buckets[0])
      self._runner.run(plan, small, buckets[0], rows, any_samples=True)
    self._runner.wait()

  def close(self) -> None:
    """Stops counting compiles. The engine must not be used afterwards."""
    self.guard.stop()

  def _remember(
    self, slot: int, prompt: Sequence[int], sampling: SamplingParams,
    constraint: Constraint | None, chain: PageChain | None,
  ) -> Request:  # fmt: skip
    stops = sampling.check(self.config.model.vocab_size, self.config.eos_token_ids)
    request = Request(
      id=self._next_id,
      slot=slot,
      prompt=tuple(prompt),
      sampling=sampling,
      stop_ids=frozenset(stops),
      constraint=constraint,
      chain=chain,
      speculates=constraint is None,
      restraint=self.config.speculate.restraint() if self.config.speculate else None,
    )
    self._next_id += 1
    self._requests[slot] = request
    self._slots[request.id] = slot
    return request

  def _dispatch(self) -> bool:
    """Schedules one step and hands it to the device; False if there was nothing to compute."""
    begin_s, budget = clock.now(), int(self._params.budget)
    self._state, packed = self._table["schedule", self.policy](self._state, self._placed_params)
    decision = unpack(np.asarray(packed), self._decisions_like[self.policy])
    num_tokens, num_rows = int(decision.num_tokens), int(decision.num_scheduled)
    preempted = self._unreported + self._ids(decision.preempted)
    self._unreported = preempted if num_tokens == 0 else ()
    if num_tokens == 0:
      return False
    bucket = bucket_for(num_tokens, self.config.buckets)
    plan = self._plan(packed, bucket)
    requests = tuple(self._requests[slot] for slot in decision.order[:num_rows].tolist())
    parts = scheduled_parts(decision, requests)
    evicted = 0 if decision.evicted is None else int(decision.evicted)
    self.prefix_stats = self.prefix_stats.plus(parts, evicted)
    small, rows = self._small_plan(packed), tuple(zip(requests, parts, strict=True))
    dispatched_s = clock.now()
    done, output, scores = self._runner.dispatch(plan, small, bucket, rows)
    self._in_flight.append(
      InFlight(
        step=self._num_steps,
        bucket=bucket,
        budget=budget,
        decision=packed,
        requests=requests,
        scheduled=parts,
        scores=scores,
        admitted=self._ids(decision.admitted),
        preempted=preempted,
        output=output,
        done=done,
        evicted=evicted,
        dispatched_s=dispatched_s,
        plan_s=dispatched_s - begin_s,
      )
    )
    self._num_steps += 1
    return True

  def _plan(self, decision: jax.Array, bucket: int) -> jax.Array:
    """The packed plan of a packed decision, on the model's device."""
    tokens = bucket_for(bucket, self.config.layouts)
    packed = np.asarray(self._table["lay_out", tokens, self.policy](self._state, decision))
    shapes = self.config.plan_shape(tokens), self.config.plan_shape(bucket)
    return jax.device_put(cut_plan(packed, *shapes), self._devices.model)

  def _small_plan(self, decision: jax.Array) -> jax.Array | None:
    """The rows of a plan in the shape of the smallest bucket, for a draft model."""
    return self._plan(decision, self.config.buckets[0]) if self.config.draft_model else None

  def _collect(self) -> StepEvents:
    """Waits for the oldest step in flight, reads its outputs and commits it."""
    flight = self._in_flight.popleft()
    jax.block_until_ready(flight.done)
    output = jax.tree.map(np.asarray, flight.output)  # None stays None
    done_s = clock.now()
    taken = flight.take_outputs(self._requests, output)
    sampled = [self._requests[slot] for slot in taken.outputs]
    digests = (self._digests.of_outputs(sampled),) if self._digests else ()
    counts = taken.counts(self.config.scheduler)
    self._state, finished = self._table["commit", self.policy](
      self._state, flight.decision, self._mask(taken.stopped), *digests, *counts
    )
    ended = set(np.flatnonzero(np.asarray(finished)).tolist())
    last = {slot: event for slot, event in taken.events if slot in ended}
    outputs = tuple(
      self._finish(event, slot, taken.stopped) if last.get(slot) is event else event
      for slot, event in taken.events
    )
    self._drafts_wait = any(
      taken.proposed.get(slot) for slot in taken.proposed if slot not in ended
    )
    return StepEvents(
      step=flight.step,
      bucket=flight.bucket,
      budget=flight.budget,
      scheduled=flight.verified(taken),
      admitted=flight.admitted,
      preempted=flight.preempted,
      dispatched_s=flight.dispatched_s,
      plan_s=flight.plan_s,
      done_s=done_s,
      outputs=outputs,
      evicted=flight.evicted,
    )

  def _finish(self, event: TokenEvent, slot: int, stopped: list[int]) -> TokenEvent:
    del self._requests[slot], self._slots[event.request_id]
    reason: FinishReason = "stop" if slot in stopped else "length"
    return dataclasses.replace(event, finish_reason=event.finish_reason or reason)

  def _mask(self, slots: Sequence[int]) -> np.ndarray:
    mask = np.zeros(self.config.scheduler.max_requests, bool)
    mask[list(slots)] = True
    return mask

  def _ids(self, mask: jax.Array) -> tuple[int, ...]:
    return tuple(self._requests[slot].id for slot in np.flatnonzero(np.asarray(mask)).tolist())
