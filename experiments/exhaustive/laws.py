"""What must hold in every state and of every step, as arrays: each law is a bool[].

`tests/testing/scheduling.py` has those of the random lives, on the host; a test holds the two
against each other.
"""

import jax
import jax.numpy as jnp

from experiments.exhaustive.canonical import Node, free_lists
from jaxserve import sched
from jaxserve.config import SchedulerConfig
from jaxserve.sched.policy import Policy
from jaxserve.types import Decision, PrefixPool, SchedulerParams, SchedulerState, Status

STATE_LAWS = {
  "pages": "every page is free or held, free ones once, held ones as often as their count says",
  "shared": "a page has several holders only if they have the same text up to its end",
  "queue": "the queue has every request once",
  "order": "the queue is in order of arrival, or of (priority, arrival); running ones in front",
  "progress": "0 <= computed < known <= max_total; whoever waits has computed nothing",
  "covered": "whoever runs has pages for what is computed",
  "ended": "whoever has all of its outputs has gone",
  "in_flight": "outputs in flight are those of the step in flight",
  "seats": "no more run than there are seats",
}
STEP_LAWS = {
  "budget": "tokens are at least 0, and together at most the budget",
  "chunk": "nobody gets more than it lacks, nor than the threshold; what fits a step enters whole",
  "samples": "a step samples whoever reaches its last known token, and counts its output",
  "start": "a step goes on where the request was; a newcomer's beginning may be cached",
  "kept": "a step loses and makes no request, and admits nobody while it preempts",
  "decode": "no decode waits",
  "overtaken": "a prompt is served only if every earlier one is",
  "acts": "a step serves or preempts somebody if requests are there and nothing is in flight",
}
LAWS = STATE_LAWS | STEP_LAWS


def of_state(node: Node, params: SchedulerParams, config: SchedulerConfig) -> dict[str, jax.Array]:
  """`STATE_LAWS` of a node as the scheduler left it."""
  state, flight = node.state, node.in_flight
  live, running = state.status != Status.FREE, state.status == Status.RUNNING
  waiting = state.status == Status.WAITING
  known, computed = state.num_known, state.num_computed
  progress = (computed >= 0) & (computed < known) & (known <= state.max_total)
  progress &= ~waiting | (computed == 0)
  due = flight.samples & (flight.arrival == state.arrival) & live
  pages, shared = _pages(state, live, config)
  return {
    "pages": pages,
    "shared": shared,
    **_queue(state, live, running, config),
    "progress": jnp.all(progress | ~live),
    "covered": jnp.all((state.num_pages * config.cache.page_size >= computed) | ~running),
    "ended": jnp.all((known - state.num_in_flight < state.max_total) | ~live),
    "in_flight": jnp.all((state.num_in_flight == due.astype(jnp.int32)) | ~live),
    "seats": jnp.sum(running, dtype=jnp.int32) <= params.max_num_seqs,
  }


def of_step(
  before: Node, after: SchedulerState, decision: Decision, params: SchedulerParams,
  config: SchedulerConfig,
) -> dict[str, jax.Array]:  # fmt: skip
  """`STEP_LAWS` of a step from one node, before anything of it is committed."""
  policy, state = sched.find_policy(config.policy), before.state
  tokens, live = decision.tokens, state.status != Status.FREE
  running, need = state.status == Status.RUNNING, state.num_known - decision.start
  cached = jnp.zeros_like(tokens) if decision.cached is None else decision.cached
  start = jnp.where(decision.preempted, 0, state.num_computed) + cached
  reaches = (tokens > 0) & (decision.start + tokens == state.num_known)
  flags = (decision.admitted & (state.status != Status.WAITING)) | (decision.preempted & ~running)
  flags |= (tokens > 0) & ~running & ~decision.admitted
  preempts = jnp.any(decision.preempted)
  return {
    "budget": jnp.all(tokens >= 0)
    & (jnp.sum(tokens, dtype=jnp.int32) == decision.num_tokens)
    & (decision.num_tokens <= params.budget),
    "chunk": _chunks(tokens, need, live, running, policy, params),
    "samples": jnp.all(decision.samples == reaches)
    & jnp.all(after.num_known == state.num_known + reaches.astype(jnp.int32)),
    "start": jnp.all((decision.start == start) | ~live)
    & jnp.all((after.num_computed == decision.start + tokens) | ~live)
    & jnp.all((cached == 0) | decision.admitted),
    "kept": jnp.all((after.status != Status.FREE) == live)
    & ~jnp.any(flags)
    & ~(preempts & jnp.any(decision.admitted)),
    **_service(before, decision, policy, config),
  }


def _chunks(
  tokens: jax.Array, need: jax.Array, live: jax.Array, running: jax.Array, policy: Policy,
  params: SchedulerParams,
) -> jax.Array:  # fmt: skip
  threshold = params.long_prefill_token_threshold
  capped = (threshold > 0) & (
    params.cap_when_alone | (jnp.sum(live, dtype=jnp.int32) > 1)
  ) & _follows_threshold(policy)  # fmt: skip
  limit = jnp.where(capped, jnp.minimum(need, threshold), need)
  whole = jnp.asarray(policy.whole_prompts) | ~params.chunked_prefill
  uncut = (tokens == 0) | (tokens == need) | (need > params.budget) | running
  kept = (tokens <= limit) & (~whole | uncut)
  return jnp.all(kept | ~live) & jnp.all((tokens == 0) | live)


def _follows_threshold(policy: Policy) -> bool:
  names = ("vllm_v1", "slo_aware", "bucket_shaped")
  return any(policy is sched.POLICIES[name] for name in names)


def _service(
  before: Node, decision: Decision, policy: Policy, config: SchedulerConfig
) -> dict[str, jax.Array]:
  """Who waits for whom."""
  state, tokens = before.state, decision.tokens
  live, running = state.status != Status.FREE, state.status == Status.RUNNING
  due = before.in_flight.samples & (before.in_flight.arrival == state.arrival) & live
  sits_out = (state.num_known >= state.max_total) | (state.await_host & due)
  decodes = running & (state.num_known - state.num_computed == 1) & ~sits_out
  served, fcfs = tokens > 0, config.ordering == "fcfs"
  decode = jnp.all(served | decision.preempted | ~decodes)
  if "decode_waits" in policy.exceptions or not fcfs:
    decode = jnp.asarray(True)
  # Running ones come first, then waiting ones; each in order of the queue.
  place = _places(state.queue)
  place = place + jnp.where(running, 0, place.shape[0])
  asks = live & ~sits_out & ~decodes
  passed = asks & ~served
  if reorders(policy):
    passed &= ~decision.preempted
  overtakes = (place[:, None] < place[None, :]) & passed[:, None] & (asks & served)[None, :]
  acts = jnp.any(served) | jnp.any(decision.preempted) | ~jnp.any(live) | before.in_flight.live
  return {
    "decode": decode,
    "overtaken": ~jnp.any(overtakes),
    "acts": acts | ("idle_steps" in policy.exceptions),
  }


def _places(queue: jax.Array) -> jax.Array:
  """i32[Q]: the place of every slot in the queue; Q for nobody."""
  slot = jnp.arange(queue.shape[0])
  found = queue[None, :] == slot[:, None]
  return jnp.where(jnp.any(found, axis=1), jnp.argmax(found, axis=1), slot.shape[0])


def reorders(policy: Policy) -> bool:
  """Whether preempted requests lose their place."""
  return any(policy is sched.POLICIES[name] for name in ("sglang", "sglang_mixed"))


def _queue(
  state: SchedulerState, live: jax.Array, running: jax.Array, config: SchedulerConfig
) -> dict[str, jax.Array]:
  queue, count = state.queue, jnp.sum(live, dtype=jnp.int32)
  size = queue.shape[0]
  lane, slot = jnp.arange(size), jnp.arange(size)
  times = jnp.sum(queue[None, :] == slot[:, None], axis=1, dtype=jnp.int32)
  whole = jnp.all(times == live.astype(jnp.int32)) & jnp.all((queue == size) == (lane >= count))
  arrival = state.arrival.at[queue].get(mode="fill", fill_value=0)
  priority = state.priority.at[queue].get(mode="fill", fill_value=0)
  runs = running.at[queue].get(mode="fill", fill_value=False)
  there = lane[1:] < count
  sorted_ = arrival[:-1] < arrival[1:]
  if config.ordering == "priority":
    sorted_ = (priority[:-1] < priority[1:]) | ((priority[:-1] == priority[1:]) & sorted_)
    front = jnp.ones_like(there)
  else:
    front = runs[:-1] | ~runs[1:]
  if reorders(sched.find_policy(config.policy)):
    sorted_ = jnp.ones_like(there)
  return {"queue": whole, "order": jnp.all((sorted_ & front) | ~there)}


def _pages(
  state: SchedulerState, live: jax.Array, config: SchedulerConfig
) -> tuple[jax.Array, jax.Array]:
  """(pages, shared)."""
  tables, page = state.block_tables, jnp.arange(config.cache.num_pages)
  column = jnp.arange(tables.shape[1])
  held = column[None] < jnp.where(live, state.num_pages, 0)[:, None]
  tables = jnp.where(held, tables, -1)
  holders = jnp.sum(tables.ravel()[None, :] == page[:, None], axis=1, dtype=jnp.int32)
  lists = jnp.concatenate(free_lists(state.pool))
  free = jnp.sum(lists[None, :] == page[:, None], axis=1, dtype=jnp.int32)
  ok = jnp.all((state.num_pages <= column.shape[0]) & (state.num_pages >= 0) & (
    live | (state.num_pages == 0))) & jnp.all(lists < page.shape[0])  # fmt: skip
  ok &= jnp.all((free == 1) == (holders == 0)) & jnp.all(free <= 1)
  ok &= state.pool.num_free == jnp.sum(free, dtype=jnp.int32)
  if not isinstance(state.pool, PrefixPool):
    return ok & jnp.all(holders <= 1), jnp.asarray(True)
  return ok & jnp.all(holders == state.pool.refs), _shared(state, tables)


def _shared(state: SchedulerState, tables: jax.Array) -> jax.Array:
  """Pages with several holders have one text, and the pool knows of no other."""
  assert isinstance(state.pool, PrefixPool)
  flat, digests = tables.ravel(), state.reuse.digests.reshape(-1, 4)
  width = tables.shape[1]
  column = jnp.arange(flat.shape[0]) % width
  known = column < jnp.repeat(state.reuse.num_digests, width)
  alike = jnp.all(digests[:, None] == digests[None], axis=-1) & known[:, None] & known[None]
  alike &= column[:, None] == column[None]
  itself = jnp.eye(flat.shape[0], dtype=bool)
  both = (flat[:, None] == flat[None]) & (flat[:, None] >= 0) & ~itself
  content = state.pool.digests.at[flat].get(mode="clip")
  published = column < jnp.repeat(state.reuse.num_published, width)
  agrees = jnp.all(content == digests, axis=-1) & known & published
  told = (flat < 0) | (content[:, 0] == 0) | agrees
  found = jnp.any(state.pool.index.ravel()[None] == jnp.arange(state.pool.refs.shape[0])[:, None],
                  axis=1)  # fmt: skip
  found |= state.pool.digests[:, 0] == 0
  return jnp.all(~both | alike) & jnp.all(told) & jnp.all(found)
