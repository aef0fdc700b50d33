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
from jaxserve.engine.in_flight import InFlight, Taken, scheduled_parts
from jaxserve.engine.model_runner import ModelRunner
from jaxserve.engine.planner import Planner
from jaxserve.engine.prefix import NO_SALT, PageDigests, PrefixStats
from jaxserve.engine.request import (
  Completion,
  Constraint,
  FinishReason,
  Listener,
  Request,
  SamplingParams,
  Scheduled,
  StepEvents,
  TokenEvent,
  check_token_ids,
  completion,
)
from jaxserve.engine.sampling_row import MAX_SEED
from jaxserve.engine.store import ExecutableStore
from jaxserve.types import Decision, SchedulerParams


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
    self._reports = table.reports
    self._rng = np.random.default_rng(seed)
    self._runner = ModelRunner(config, leaves, table, where.model, draft)
    self._planner = Planner(config, table, where)
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
    attention.register(config, store.kernels if store else None)
    table = compiler.compile_all(cls.programs(config, graphdef, leaves, draft), store=store)
    platform = where.model.platform
    drafter = drafting.DraftModel(config, draft, table, platform) if draft else None
    params = sched.make_params(config.scheduler) if params is None else params
    engine = cls(config, leaves, table, where, params, seed, salt, drafter)
    drafts = drafter.kv_bytes if drafter else 0
    kv = engine.kv_bytes
    table.check_in_place({"forward": kv, "decode_steps": kv, "follow": drafts, "draft": drafts})
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
    return self._reports

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
    return self._planner.num_free_pages

  def set_params(self, params: SchedulerParams) -> None:
    """Changes budget, seats or threshold from the next scheduled step on; nothing recompiles."""
    self._params = params
    self._planner.set_params(params)
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
    policies = self._planner.policies
    if policy not in policies:
      built = ", ".join(map(str, policies))
      raise ValueError(f"policy={policy!r}: the engine was built for {built}")
    kept = tuple(p for p in policies if p != policy and isinstance(p, str))
    self._planner.set_policy(policy)
    self.config = dataclasses.replace(
      self.config, scheduler=self._planner.shapes, other_policies=kept
    )
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
      self._planner.clear()

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
    slot = self._planner.submit(len(prompt), limit, priority, constraint is not None, reuse)
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
    self._planner.abort([slot])
    if self.listener:
      self.listener.on_abort(request_id)
    return completion(self._requests.pop(slot), "abort")

  def step(self) -> StepEvents | None:
    """Keeps the device one step ahead and returns the oldest unread step, or None when idle.

    With overlap, step n + 1 is dispatched before the outputs of step n are read here.
    """
    self._keep_ahead()
    while self._in_flight:
      events = self._collect()
      if events is not None:
        if self.listener:
          self.listener.on_step(events)
        return events
      self._keep_ahead()
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
    empty, plan = self._planner.schedule(), self._planner.plan
    small = plan(empty, buckets[0]) if self.config.draft_model else None
    for bucket in (b for b in buckets if b <= largest):
      self._runner.run(plan(empty, bucket), small, bucket, 0, any_samples=False)
    for rows in self.config.rows:
      self._runner.run(plan(empty, buckets[0]), small, buckets[0], rows, any_samples=True)
    for bucket in self.config.decode_buckets if self.config.decode_steps > 1 else ():
      self._runner.decode_steps(self._planner.idle_decode_plans(empty, bucket), 1, bucket)
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

  def _keep_ahead(self) -> None:
    """Dispatches until the device has something to do while outputs are read."""
    # Drafts are for who is known to be there: while there are some, nothing is dispatched ahead.
    depth = 1 if self.config.overlap and not self._drafts_wait else 0
    # Steps that were dispatched together count once.
    while (
      self._requests and sum(not (i and f.place) for i, f in enumerate(self._in_flight)) <= depth
    ):
      # With nothing in flight, a policy may still sit some steps out.
      if not any(self._dispatch() for _ in range(1 if self._in_flight else sched.MOST_IDLE_STEPS)):
        break

  def _dispatch(self) -> bool:
    """Schedules a step, or several of decodes, and dispatches them; False if it is empty."""
    begin_s, budget = clock.now(), int(self._params.budget)
    decided = self._planner.decide()
    first = decided.decisions[0]
    preempted = self._unreported + self._ids(first.preempted)
    self._unreported = preempted if decided.plan is None else ()
    if decided.plan is None:
      return False
    rows = [self._rows(decision) for decision in decided.decisions]
    dispatched_s = clock.now()
    done, output, scores = self._runner.dispatch(decided, rows)
    for place, decision in enumerate(decided.decisions):
      requests, parts = zip(*rows[place], strict=True)
      self._in_flight.append(
        InFlight(
          bucket=decided.bucket,
          budget=budget,
          decision=decided.packed[place],
          requests=requests,
          scheduled=parts,
          scores=scores,
          admitted=self._ids(decision.admitted),
          preempted=self._ids(decision.preempted) if place else preempted,
          output=output,
          done=done,
          evicted=0 if decision.evicted is None else int(decision.evicted),
          dispatched_s=dispatched_s,
          plan_s=(dispatched_s - begin_s) / len(rows),
          place=place if len(rows) > 1 else None,
        )
      )
    return True

  def _collect(self) -> StepEvents | None:
    """Waits for the oldest step in flight, reads and commits it; None if it was not run."""
    flight = self._in_flight.popleft()
    output = flight.read()
    done_s = clock.now()
    taken = flight.take_outputs(self._requests, output)
    digests: tuple[np.ndarray, ...] = ()
    if self._digests:
      digests = (self._digests.of_outputs(self._requests[slot] for slot in taken.outputs),)
    counts = taken.counts(self.config.scheduler)
    ended = self._planner.commit(flight.decision, taken.stopped, *digests, *counts)
    outputs = self._outputs(taken, ended)
    self._drafts_wait = any(
      taken.proposed.get(slot) for slot in taken.proposed if slot not in ended
    )
    if not flight.was_run:
      return None
    self._num_steps += 1
    return StepEvents(
      step=self._num_steps - 1,
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

  def _outputs(self, taken: Taken, ended: set[int]) -> tuple[TokenEvent, ...]:
    """The events of a step; the last one of a request that has ended says so."""
    if not ended:
      return tuple(event for _, event in taken.events)
    last = {slot: event for slot, event in taken.events if slot in ended}
    return tuple(
      self._finish(event, slot, taken.stopped) if last.get(slot) is event else event
      for slot, event in taken.events
    )

  def _finish(self, event: TokenEvent, slot: int, stopped: list[int]) -> TokenEvent:
    del self._requests[slot], self._slots[event.request_id]
    reason: FinishReason = "stop" if slot in stopped else "length"
    return event._replace(finish_reason=event.finish_reason or reason)

  def _rows(self, decision: Decision) -> tuple[tuple[Request, Scheduled], ...]:
    """The rows of a decision on the host, in order, with what is granted to each."""
    slots = decision.order[: int(decision.num_scheduled)].tolist()
    requests = [self._requests[slot] for slot in slots]
    parts = scheduled_parts(decision, requests)
    evicted = 0 if decision.evicted is None else int(decision.evicted)
    self.prefix_stats = self.prefix_stats.plus(parts, evicted)
    return tuple(zip(requests, parts, strict=True))

  def _ids(self, mask: jax.Array) -> tuple[int, ...]:
    return tuple(self._requests[slot].id for slot in np.asarray(mask).nonzero()[0].tolist())
