"""One iteration of a server in virtual time: arrivals, `schedule`, a duration, `commit`.

It calls the scheduler that the engine calls. What it leaves out is which page holds what: the state
has no block tables and its pool only a count, since no decision looks at a page's number. With a
prefix cache decisions do, and all is there; digests come with the workload.

One iteration is one call of `Engine.step`: with overlap, step n + 1 is decided when step n - 1 has
ended, and step n is committed after that. So what arrives, and what step n frees, is seen one
step late, as in the engine.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve import sched
from jaxserve.config import SchedulerConfig
from jaxserve.pytree import pytree_dataclass
from jaxserve.sim import clock
from jaxserve.sim.clock import Instant
from jaxserve.sim.load import StepLoad, StepTime
from jaxserve.types import Decision, SchedulerParams, SchedulerState, Status

_MOST_TOKENS = 46_340


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
  """What is fixed for a simulation; hashable, so that it keys compiled functions.

  Attributes:
    config: of the scheduler; its max_budget at most 46,340, the square of which is an int32.
    step_time: seconds of a step.
    overlap: a step is decided before the outputs of the one before are read, as in the engine.
    buckets: token counts that steps are padded to, rising; (): none.
    handed_over: requests arrive with their prompt's KV and their first output, which another server
      made. Their first step is a decode; only a preemption makes this server compute their prompt.
  """

  config: SchedulerConfig
  step_time: StepTime
  overlap: bool = True
  buckets: tuple[int, ...] = ()
  handed_over: bool = False

  def __post_init__(self) -> None:
    if self.config.max_budget > _MOST_TOKENS:
      raise ValueError(
        f"max_budget={self.config.max_budget}: sums of a step overflow above {_MOST_TOKENS}"
      )
    if self.handed_over and self.config.prefix_cache:
      raise ValueError(
        "prefix_cache=True: a server that is handed computed prompts has none; turn it off"
      )
    if self.buckets and self.buckets[-1] != self.config.max_budget:
      raise ValueError(
        f"buckets={self.buckets}: the last must be max_budget={self.config.max_budget}"
      )


@pytree_dataclass
class Requests:
  """A workload on the device, in order of arrival, padded to n.

  count: i32[], requests; what stands behind them never arrives.
  arrival: Instant of i32[n].
  num_prompt: i32[n].
  max_total: i32[n], tokens at which each ends.
  priority: i32[n].
  first_output: i32[n], index of its first output among the outputs of all.
  digests: u32[n, M, 4], of all pages that its prompt and outputs fill; None without a prefix cache.
  num_digests: i32[n], those of the prompt.
  """

  count: jax.Array
  arrival: Instant
  num_prompt: jax.Array
  max_total: jax.Array
  priority: jax.Array
  first_output: jax.Array
  digests: Any = None
  num_digests: Any = None


@pytree_dataclass
class InFlight:
  """A step whose outputs are on their way.

  live: bool[], there is one.
  samples: bool[Q].
  arrival: i32[Q], submit numbers.
  end: Instant at which its outputs are there.
  """

  live: jax.Array
  samples: jax.Array
  arrival: jax.Array
  end: Instant


@pytree_dataclass
class Counts:
  """Sums over steps.

  steps: i32[], steps that computed something.
  tokens: i32[], computed by them.
  padding: i32[], added to them.
  preemptions: i32[].
  cached: i32[], tokens found in the prefix cache.
  busy: Instant, the sum of the steps' durations.
  """

  steps: jax.Array
  tokens: jax.Array
  padding: jax.Array
  preemptions: jax.Array
  cached: jax.Array
  busy: Instant


@pytree_dataclass
class SimState:
  """A server at work, and what it has done so far.

  sched: SchedulerState without page numbers.
  now: Instant of the host.
  free_at: Instant at which the device has done all that it was given.
  next: i32[], requests submitted.
  idle_rounds: i32[], iterations on end in which nothing happened though somebody waits.
  in_flight: InFlight.
  started: Instant of i32[n], begin of the first step that computed a token of it.
  tokens: Instant of i32[total outputs], when each came out.
  counts: Counts.
  """

  sched: SchedulerState
  now: Instant
  free_at: Instant
  next: jax.Array
  idle_rounds: jax.Array
  in_flight: InFlight
  started: Instant
  tokens: Instant
  counts: Counts


def init(config: SchedulerConfig, num_requests: int, num_outputs: int) -> SimState:
  """An idle server at time 0.

  Args:
    config: of the scheduler.
    num_requests: n.
    num_outputs: output tokens of all requests.
  """
  slots = config.max_requests

  def zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)

  return SimState(
    sched=without_pages(sched.init(config)),
    now=clock.zero(),
    free_at=clock.zero(),
    next=zeros(),
    idle_rounds=zeros(),
    in_flight=InFlight(
      live=jnp.zeros((), bool), samples=jnp.zeros(slots, bool), arrival=zeros(slots),
      end=clock.zero(),
    ),
    started=Instant(s=zeros(num_requests), ns=zeros(num_requests)),
    tokens=Instant(s=zeros(num_outputs), ns=zeros(num_outputs)),
    counts=no_counts(),
  )  # fmt: skip


def no_counts() -> Counts:
  """All sums 0."""
  names = ("steps", "tokens", "padding", "preemptions", "cached")
  zeros = [jnp.zeros((), jnp.int32) for _ in names]
  return Counts(**dict(zip(names, zeros, strict=True)), busy=clock.zero())


def without_pages(state: SchedulerState) -> SchedulerState:
  """The state with page counts but no page numbers: tables of no columns, a pool of one cell.

  With a prefix cache, the state as it is.
  """
  if state.reuse is not None:
    return state
  tables = jnp.zeros((state.status.shape[0], 0), jnp.int32)
  pool = dataclasses.replace(state.pool, free_pages=jnp.zeros(1, jnp.int32))
  return dataclasses.replace(state, block_tables=tables, pool=pool)


def step(
  sim: SimState, requests: Requests, params: SchedulerParams, server: Server
) -> tuple[SimState, Decision]:
  """One iteration; a finished simulation is left as it is.

  Args:
    sim: not modified.
    requests: all that will ever arrive.
    params: numbers one may sweep.
    server: static.

  Returns:
    (state, what was decided in this iteration, possibly nothing).

  Cost: that of `schedule` and `commit`, and O(Q).
  """
  sim = _admit(sim, requests, server)
  state, decision = sched.schedule(sim.sched, params, server.config)
  sim = dataclasses.replace(sim, sched=state)
  sim, begin, flight = _dispatch(sim, decision, server)
  sim = _note_start(sim, decision, begin)
  done = sim.in_flight if server.overlap else flight
  sim = _collect(sim, requests, decision, done, server.config)
  acted = flight.live | done.live | jnp.any(decision.preempted)
  waits = jnp.any(sim.sched.status != Status.FREE)
  return dataclasses.replace(
    sim,
    in_flight=flight if server.overlap else sim.in_flight,
    idle_rounds=jnp.where(acted | ~waits, 0, sim.idle_rounds + 1),
  ), decision


def running(sim: SimState, requests: Requests) -> jax.Array:
  """bool[]: something is still to be done, and gets done."""
  left = sim.next < requests.count
  busy = left | jnp.any(sim.sched.status != Status.FREE)
  return busy & (sim.idle_rounds < sched.MOST_IDLE_STEPS)


def _admit(sim: SimState, requests: Requests, server: Server) -> SimState:
  """Submits whoever has arrived while there are slots; an idle server waits for the next."""
  count = requests.count
  empty = ~jnp.any(sim.sched.status != Status.FREE)

  def arrival(index: jax.Array) -> Instant:
    return jax.tree.map(lambda x: x.at[index].get(mode="clip"), requests.arrival)

  waits = empty & (sim.next < count)
  now = clock.where(waits, clock.later(sim.now, arrival(sim.next)), sim.now)

  def due(carry: tuple) -> jax.Array:
    state, index = carry
    there = (index < count) & ~clock.before(now, arrival(index))
    return there & jnp.any(state.status == Status.FREE)

  def submit(carry: tuple) -> tuple:
    state, index = carry
    prompt, total, priority = (
      x[index] for x in (requests.num_prompt, requests.max_total, requests.priority)
    )
    reuse = {}
    if state.reuse is not None:
      reuse = {"digests": requests.digests[index], "num_digests": requests.num_digests[index]}
    state, slot = sched.submit(state, prompt, total, priority=priority, **reuse)
    if server.handed_over:
      known = state.num_known.at[slot].add(1, mode="drop")
      computed = state.num_computed.at[slot].set(prompt, mode="drop")
      state = dataclasses.replace(state, num_known=known, num_computed=computed)
    return state, index + 1

  state, index = lax.while_loop(due, submit, (sim.sched, sim.next))
  return dataclasses.replace(sim, sched=state, next=index, now=now)


def _dispatch(
  sim: SimState, decision: Decision, server: Server
) -> tuple[SimState, Instant, InFlight]:
  """Gives the step to the device, which begins it when it has done the one before."""
  state, live = sim.sched, decision.num_tokens > 0
  bucket = decision.num_tokens
  if server.buckets:
    table = jnp.asarray(server.buckets, jnp.int32)
    bucket = jnp.min(jnp.where(table >= decision.num_tokens, table, table[-1]))
  load = StepLoad(
    tokens=decision.tokens,
    prefix=decision.start,
    decodes=(decision.tokens == 1) & (decision.start >= state.num_prompt),
    samples=decision.samples,
    bucket=bucket,
  )
  took = clock.duration(server.step_time(load))
  begin = clock.later(sim.free_at, sim.now)
  end = clock.add(begin, took)
  counts = Counts(
    steps=sim.counts.steps + live.astype(jnp.int32),
    tokens=sim.counts.tokens + decision.num_tokens,
    padding=sim.counts.padding + jnp.where(live, bucket - decision.num_tokens, 0),
    preemptions=sim.counts.preemptions + jnp.sum(decision.preempted, dtype=jnp.int32),
    cached=sim.counts.cached + (0 if decision.cached is None else jnp.sum(decision.cached)),
    busy=clock.where(live, clock.add(sim.counts.busy, took), sim.counts.busy),
  )
  flight = InFlight(live=live, samples=decision.samples, arrival=decision.arrival, end=end)
  sim = dataclasses.replace(
    sim, counts=counts, free_at=clock.where(live, end, sim.free_at)
  )  # fmt: skip
  return sim, begin, flight


def _note_start(sim: SimState, decision: Decision, begin: Instant) -> SimState:
  """When requests are computed for the first time; a resumed one keeps its first start."""
  fresh = decision.admitted & (sim.sched.num_preemptions == 0)
  return dataclasses.replace(
    sim, started=_put(sim.started, fresh, decision.arrival, begin)
  )  # fmt: skip


def _collect(
  sim: SimState, requests: Requests, decision: Decision, done: InFlight, config: SchedulerConfig
) -> SimState:  # fmt: skip
  """Waits for the outputs of a step, writes down when they came, and commits it."""
  state = sim.sched
  index = state.num_known - state.num_in_flight - state.num_prompt
  index += requests.first_output.at[done.arrival].get(mode="clip")
  decision = dataclasses.replace(decision, samples=done.samples, arrival=done.arrival)
  state, _ = sched.commit(
    state, decision, jnp.zeros_like(done.samples),
    digests=_new_digests(state, requests, done, config),
  )  # fmt: skip
  return dataclasses.replace(
    sim,
    sched=state,
    now=clock.where(done.live, done.end, sim.now),
    tokens=_put(sim.tokens, done.samples, index, done.end),
  )


def _new_digests(
  state: SchedulerState, requests: Requests, done: InFlight, config: SchedulerConfig
) -> Any:
  """The digests of pages that the outputs of a step complete, u32[Q, 4], else 0; see `commit`."""
  if state.reuse is None:
    return None
  page = state.reuse.num_digests
  tokens = state.num_known - state.num_in_flight + 1
  complete = done.samples & (tokens >= (page + 1) * config.cache.page_size)
  digests = requests.digests.at[done.arrival, page].get(mode="clip")
  return jnp.where(complete[:, None], digests, 0)


def _put(times: Instant, chosen: jax.Array, index: jax.Array, value: Instant) -> Instant:
  """Writes one instant to the places `index` of the chosen."""
  size = times.s.shape[0]
  place = jnp.where(chosen, index, size + jnp.arange(chosen.shape[0], dtype=jnp.int32))

  def put(field: jax.Array, at: jax.Array) -> jax.Array:
    return field.at[place].set(at, mode="drop", unique_indices=True)

  return jax.tree.map(put, times, value)
