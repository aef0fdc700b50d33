"""How requests enter and leave: init, submit, abort, commit."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jaxserve import cache
from jaxserve.config import SchedulerConfig
from jaxserve.sched import drafts, policies, reuse
from jaxserve.types import Decision, SchedulerState, Status


def init(config: SchedulerConfig) -> SchedulerState:
  """No request, every page free."""
  num_requests = config.max_requests

  def zeros() -> jax.Array:  # one buffer each, so that the state can be donated
    return jnp.zeros(num_requests, jnp.int32)

  return SchedulerState(
    queue=jnp.full(num_requests, num_requests, jnp.int32),
    status=zeros(),
    arrival=zeros(),
    priority=zeros(),
    num_prompt=zeros(),
    num_known=zeros(),
    num_computed=zeros(),
    max_total=zeros(),
    num_in_flight=zeros(),
    await_host=jnp.zeros(num_requests, bool),
    num_pages=zeros(),
    block_tables=jnp.zeros((num_requests, config.pages_per_request), jnp.int32),
    num_preemptions=zeros(),
    pool=(cache.prefix if config.prefix_cache else cache).create(config.cache.num_pages),
    num_submitted=jnp.zeros((), jnp.int32),
    policy=policies.rule_of(config).init(config),
    reuse=reuse.init(config),
    num_drafts=zeros() if config.max_drafts else None,
  )


def submit(
  state: SchedulerState,
  num_prompt: jax.Array,
  max_total: jax.Array,
  *,
  priority: jax.Array | int = 0,
  await_host: jax.Array | bool = False,
  digests: jax.Array | None = None,
  num_digests: jax.Array | int = 0,
  reads_cache: jax.Array | bool = True,
) -> tuple[SchedulerState, jax.Array]:
  """Accepts a request into the waiting queue, or refuses it when all Q slots are taken.

  Args:
    state: not modified.
    num_prompt: i32[], prompt tokens; checked by `check_request` beforehand.
    max_total: i32[], prompt and output tokens at which it ends; see `request_limit`.
    priority: i32[], smaller is more urgent; orders the queue if the config says "priority".
      Leave it 0 under FCFS.
    await_host: bool[], never schedule it while one of its outputs is in flight.
    digests: u32[M, 4], of the prompt's full pages, see `cache.page_digests`; only with a prefix
      cache, and None then means that nothing of it can be shared.
    num_digests: i32[], how many they are.
    reads_cache: bool[], it may hit; whoever wants to see all of its prompt may not. Its own pages
      can be hit in any case.

  Returns:
    (state, slot i32[]); slot == Q and the state unchanged when the queue is full.

  Cost: O(Q).
  """
  num_requests = state.status.shape[0]
  free = state.status == Status.FREE
  slot = jnp.where(jnp.any(free), jnp.argmax(free), num_requests).astype(jnp.int32)
  priority = jnp.asarray(priority, jnp.int32)

  def put(field: jax.Array, value: jax.Array | int | bool) -> jax.Array:
    return field.at[slot].set(jnp.asarray(value, field.dtype), mode="drop")

  known = state.reuse
  if known is not None:
    digests = jnp.zeros(known.digests.shape[1:], jnp.uint32) if digests is None else digests
    known = reuse.enter(known, slot, digests, num_digests, reads_cache)
  return dataclasses.replace(
    state,
    queue=jnp.where(slot < num_requests, _insert(state, slot, priority), state.queue),
    status=put(state.status, Status.WAITING),
    arrival=put(state.arrival, state.num_submitted),
    priority=put(state.priority, priority),
    num_prompt=put(state.num_prompt, num_prompt),
    num_known=put(state.num_known, num_prompt),
    num_computed=put(state.num_computed, 0),
    max_total=put(state.max_total, max_total),
    num_in_flight=put(state.num_in_flight, 0),
    await_host=put(state.await_host, await_host),
    num_pages=put(state.num_pages, 0),
    num_preemptions=put(state.num_preemptions, 0),
    reuse=known,
    num_drafts=None if state.num_drafts is None else put(state.num_drafts, 0),
    num_submitted=state.num_submitted + (slot < num_requests).astype(jnp.int32),
  ), slot


def abort(state: SchedulerState, requests: jax.Array) -> SchedulerState:
  """Ends requests from outside, in any state; their pages are free at once.

  Outputs still in flight are ignored by `commit`, because the slot is free or has a new arrival
  number by then.

  Args:
    state: not modified.
    requests: bool[Q]; free slots among them are ignored.
  """
  chex.assert_shape(requests, state.status.shape)
  return _finish(state, requests & (state.status != Status.FREE))


def commit(
  state: SchedulerState,
  decision: Decision,
  stopped: jax.Array,
  *,
  digests: jax.Array | None = None,
  outputs: jax.Array | None = None,
  proposed: jax.Array | None = None,
) -> tuple[SchedulerState, jax.Array]:
  """Takes note of the outputs of a step, possibly while later steps are in flight.

  A request ends when the host says so (end of sequence, stop token) or by length, which counts only
  committed outputs. Its seat and pages are free for the next `schedule`. What a later step in
  flight computes for it is ignored when that step is committed.

  Args:
    state: not modified.
    decision: of the step; steps are committed in the order in which they were scheduled.
    stopped: bool[Q], the sampled token ends the request; read only where the step sampled.
    digests: u32[Q, 4], the next digest of each request where the step's output completes a page, 0
      elsewhere; only with a prefix cache, None: no page.
    outputs: i32[Q], tokens that the step yielded: the drafts accepted and one more; read only where
      the step sampled. None: one each.
    proposed: i32[Q], new drafts behind the last of them; at most config.max_drafts. None: none.

  Returns:
    (state, finished bool[Q]).
  """
  chex.assert_shape(stopped, state.status.shape)
  live = decision.samples & (state.arrival == decision.arrival) & (state.status != Status.FREE)
  in_flight = state.num_in_flight - live.astype(jnp.int32)
  if decision.drafts is not None:
    state = drafts.settle(state, decision, live, outputs, proposed)
  finished = live & (stopped | (state.num_known - in_flight >= state.max_total))
  state = dataclasses.replace(state, num_in_flight=in_flight)
  if digests is not None:
    state = dataclasses.replace(state, reuse=reuse.note_digests(state.reuse, live, digests))
  return _finish(state, finished), finished


def release_pages(
  state: SchedulerState, requests: jax.Array, last_first: bool = False
) -> SchedulerState:
  """Gives back all pages of `requests`, bool[Q]. Cost: O(Q + M) for each of them.

  With a prefix cache the order says what is evicted first: that of the queue, or its reverse.
  """
  order = None if state.reuse is None else state.queue[::-1] if last_first else state.queue

  def body(carry: tuple) -> tuple:
    left, pool = carry
    lane = jnp.argmax(left)
    request = lane if order is None else order[lane]
    pool = cache.release(pool, state.block_tables[request], state.num_pages[request])
    return left.at[lane].set(False), pool

  left = requests & (state.num_pages > 0)
  if order is not None:
    left = left.at[order].get(mode="fill", fill_value=False)
  _, pool = lax.while_loop(lambda carry: jnp.any(carry[0]), body, (left, state.pool))
  state = dataclasses.replace(state, pool=pool, num_pages=jnp.where(requests, 0, state.num_pages))
  if state.reuse is None:
    return state
  return dataclasses.replace(state, reuse=reuse.forget(state.reuse, requests))


def _insert(state: SchedulerState, slot: jax.Array, priority: jax.Array) -> jax.Array:
  """The queue with `slot` behind everything at least as urgent. Arrival numbers only grow."""
  num_requests = state.queue.shape[0]
  urgent = state.priority.at[state.queue].get(mode="fill", fill_value=0) <= priority
  place = jnp.sum(urgent & (state.queue < num_requests), dtype=jnp.int32)
  lane = jnp.arange(num_requests, dtype=jnp.int32)
  shifted = jnp.roll(state.queue, 1)
  return jnp.where(lane < place, state.queue, jnp.where(lane == place, slot, shifted))


def _finish(state: SchedulerState, requests: jax.Array) -> SchedulerState:
  """Frees the slots and pages of `requests`, bool[Q], and closes the gaps in the queue."""
  num_requests = state.queue.shape[0]
  state = release_pages(reuse.publish(state, jnp.any(requests)), requests)
  status = jnp.where(requests, int(Status.FREE), state.status)
  keep = status.at[state.queue].get(mode="fill", fill_value=Status.FREE) != Status.FREE
  lane = jnp.arange(num_requests, dtype=jnp.int32)
  place = jnp.where(keep, jnp.cumsum(keep, dtype=jnp.int32) - 1, num_requests + lane)
  queue = jnp.full(num_requests, num_requests, jnp.int32)
  queue = queue.at[place].set(state.queue, mode="drop", unique_indices=True)
  return dataclasses.replace(state, status=status, queue=queue)
