"""What the prefix cache does to a step: who hits, what a preemption frees, who is told of pages.

  hit          h_i = max(pages the pool knows, max_j min(shared pages of i and j, full pages of j)),
               j running or admitted before i in this step, full pages after this step
  start        min(S h_i, known_i - 1): one token is computed, to have something to sample from
  free pages   h_i costs those of its pages that nobody held, once for each page
  reclaimable  a page belongs to the first of its holders in order of service, so what the tail of
               the running order gives back is a sum

Hits depend on what was granted before, so newcomers are admitted one after the other. Pages are
published, that is, made known to the pool, at the start of the next step or before they are given
back: within a step, sharing needs no pool. The hits of a step are taken before any page is handed
out, so no step evicts what it is about to use.

`tests/testing/prefix_oracle.py` has the same as plain loops. Source: vLLM V1 `KVCacheManager`.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.cache import prefix
from jaxserve.config import SchedulerConfig
from jaxserve.sched.policy import Context, Draft
from jaxserve.types import Reuse, SchedulerState


def init(config: SchedulerConfig) -> Reuse | None:
  """Nothing to reuse; None without a prefix cache."""
  if not config.prefix_cache:
    return None
  num_requests = config.max_requests
  columns = ("num_digests", "num_full", "num_published", "num_shared")
  return Reuse(
    digests=jnp.zeros((num_requests, config.pages_per_request, 4), jnp.uint32),
    reads=jnp.zeros(num_requests, bool),
    **{name: jnp.zeros(num_requests, jnp.int32) for name in columns},
  )


def enter(
  reuse: Reuse, slot: jax.Array, digests: jax.Array, num_digests: jax.Array | int,
  reads: jax.Array | bool,
) -> Reuse:  # fmt: skip
  """Notes the digests, u32[M, 4], of a prompt submitted at `slot`; Q for one that was refused."""
  nothing = {
    name: getattr(reuse, name).at[slot].set(0, mode="drop")
    for name in ("num_full", "num_published", "num_shared")
  }
  return dataclasses.replace(
    reuse,
    digests=reuse.digests.at[slot].set(digests, mode="drop"),
    num_digests=reuse.num_digests.at[slot].set(num_digests, mode="drop"),
    reads=reuse.reads.at[slot].set(reads, mode="drop"),
    **nothing,
  )


def note_digests(reuse: Reuse, requests: jax.Array, digests: jax.Array) -> Reuse:
  """One more digest, u32[Q, 4], for each of `requests`, bool[Q], where its word 0 is not zero."""
  new = requests & (digests[:, 0] != 0)
  lane = jnp.arange(new.shape[0], dtype=jnp.int32)
  row = jnp.where(new, lane, new.shape[0] + lane)
  return dataclasses.replace(
    reuse,
    digests=reuse.digests.at[row, reuse.num_digests].set(digests, mode="drop", unique_indices=True),
    num_digests=reuse.num_digests + new.astype(jnp.int32),
  )


def forget(reuse: Reuse, requests: jax.Array) -> Reuse:
  """Requests, bool[Q], that gave back their pages; their digests stay."""
  names = ("num_full", "num_published", "num_shared")
  nothing = {name: jnp.where(requests, 0, getattr(reuse, name)) for name in names}
  return dataclasses.replace(reuse, **nothing)


def publish(state: SchedulerState, when: jax.Array | bool = True) -> SchedulerState:
  """Tells the pool the digests of full pages that it does not know yet, if `when`, bool[].

  Cost: O(Q), and a pass for 32 pages.
  """
  reuse = state.reuse
  if reuse is None:
    return state
  known = jnp.where(when, jnp.minimum(reuse.num_digests, reuse.num_full), 0)
  count = jnp.maximum(known - reuse.num_published, 0)
  ends = jnp.cumsum(count, dtype=jnp.int32)
  lane = jnp.arange(prefix.PUBLISH_LANES, dtype=jnp.int32)
  begin = reuse.num_published - (ends - count)

  def some(carry: tuple) -> tuple:
    pool, at = carry
    row = jnp.searchsorted(ends, at + lane, side="right").astype(jnp.int32)
    column = at + lane + begin.at[row].get(mode="clip")
    ids = state.block_tables.at[row, column].get(mode="clip")
    digests = reuse.digests.at[row, column].get(mode="clip")
    return prefix.publish(pool, ids, digests, ends[-1] - at), at + lane.shape[0]

  carry = state.pool, jnp.zeros((), jnp.int32)
  pool, _ = lax.while_loop(lambda carry: carry[1] < ends[-1], some, carry)
  published = jnp.maximum(known, reuse.num_published)
  return dataclasses.replace(
    state, pool=pool, reuse=dataclasses.replace(reuse, num_published=published)
  )


def owned(draft: Draft, context: Context, held: jax.Array, lacking: jax.Array) -> jax.Array:
  """i32[Q]: pages of each running request that no request before it holds.

  So the requests from any place on give back the sum of theirs. Cost: O(Q M), where pages lack.

  Args:
    draft: pages held are in its order.
    context: has the block tables.
    held: i32[Q], pages of those that run; what is returned where nothing lacks.
    lacking: bool[], somebody will be preempted.
  """
  state = context.state
  num_pages = context.config.cache.num_pages
  lane = jnp.arange(held.shape[0], dtype=jnp.int32)[:, None]

  def count(carry: tuple) -> tuple:
    tables = state.block_tables.at[draft.request].get(mode="clip")
    column = jnp.arange(tables.shape[1], dtype=jnp.int32)
    tables = jnp.where(column[None] < held[:, None], tables, num_pages)
    first = jnp.full(num_pages, held.shape[0], jnp.int32).at[tables].min(lane, mode="drop")
    mine = first.at[tables].get(mode="fill", fill_value=held.shape[0]) == lane
    return jnp.zeros((), bool), jnp.sum(mine, axis=1, dtype=jnp.int32)

  # A condition that stays lazy under vmap.
  return lax.while_loop(lambda carry: carry[0], count, (lacking, held))[1]


class Hit(NamedTuple):
  """What a newcomer need not compute.

  pages: i32[], its first pages that somebody has computed, or computes in this step.
  source: i32[], the request whose pages they are; Q: those that the pool knows.
  unheld: i32[], how many of them nobody holds yet.
  shared: i32[Q], full pages that it has in common with each request, in order of service.
  """

  pages: jax.Array
  source: jax.Array
  unheld: jax.Array
  shared: jax.Array


def find_hit(
  lane: jax.Array, draft: Draft, context: Context, full: jax.Array, first: jax.Array
) -> Hit:
  """The pages that the newcomer at `lane` can share.

  Args:
    lane: i32[], its place in the order of service.
    draft: those admitted before it have their hits in it.
    context: has pool and digests.
    full: i32[Q], pages that each request before it has full after this step; 0 for others.
    first: u32[Q, 4], digests of everybody's first page.

  Cost: O(hit) for the pool, O(Q), and O(Q log M) where somebody else begins alike.
  """
  state, config = context.state, context.config
  slot, nobody = draft.request[lane], config.max_requests
  digests = state.reuse.digests[slot]
  tokens = draft.known[lane] - (1 if config.recompute_last_page else 0)
  limit = jnp.minimum(state.reuse.num_digests[slot], tokens // config.cache.page_size)
  limit = jnp.where(state.reuse.reads[slot] & (draft.computed[lane] == 0), limit, 0)
  ids, cached = prefix.lookup(state.pool, digests, limit)
  known = state.reuse.num_digests.at[draft.request].get(mode="fill", fill_value=0)
  alike = jnp.all(first == digests[:1], axis=-1) & (jnp.minimum(known, limit) > 0)
  shared = _shared(draft, context, digests, jnp.where(alike, jnp.minimum(known, limit), 0))
  reach = jnp.minimum(shared, full)
  best, source = jnp.max(reach), draft.request[jnp.argmax(reach)]
  # Whoever was admitted before has taken the pages of its hits.
  taken = jnp.max(jnp.where(draft.admitted, jnp.minimum(shared, draft.hits), 0))
  unheld = prefix.num_unheld(state.pool, ids, taken, cached)
  others = best > cached
  return Hit(
    pages=jnp.maximum(best, cached),
    source=jnp.where(others, source, nobody),
    unheld=jnp.where(others, 0, unheld),
    shared=shared,
  )


def _shared(draft: Draft, context: Context, digests: jax.Array, most: jax.Array) -> jax.Array:
  """i32[Q]: leading pages equal to those of `digests`, u32[M, 4], of at most `most`, i32[Q].

  Digests are chained: pages are equal up to a place if those at that place are. Where `most` is
  above 0, the first pages are known to be equal.
  """
  table = context.state.reuse.digests

  def halve(carry: tuple) -> tuple:
    low, high = carry  # equal up to low, at most up to high
    middle = (low + high + 1) // 2
    theirs = table.at[draft.request, middle - 1].get(mode="clip")
    equal = jnp.all(theirs == digests.at[middle - 1].get(mode="clip"), axis=-1) | (middle == low)
    return jnp.where(equal, middle, low), jnp.where(equal, high, middle - 1)

  low = jnp.minimum(most, 1)
  return lax.while_loop(lambda carry: jnp.any(carry[0] < carry[1]), halve, (low, most))[0]


def take_hits(state: SchedulerState, grants: Draft) -> SchedulerState:
  """Takes the pages that newcomers hit in the pool, before any page is handed out."""
  nobody = state.queue.shape[0]
  hits = jnp.where(grants.admitted, grants.hits, 0)
  mask = (hits > 0) & (grants.source == nobody)

  def take(lane: jax.Array, carry: tuple) -> tuple:
    pool, tables = carry
    slot = grants.request[lane]
    ids, _ = prefix.lookup(pool, state.reuse.digests[slot], hits[lane])
    return prefix.acquire(pool, ids, hits[lane]), tables.at[slot].set(ids)

  pool, tables = _for_each(mask, take, (state.pool, state.block_tables))
  lane = jnp.arange(nobody, dtype=jnp.int32)
  row = jnp.where(hits > 0, grants.request, nobody + lane)

  def put(field: jax.Array) -> jax.Array:
    return field.at[row].set(hits, mode="drop", unique_indices=True)

  reuse = state.reuse
  reuse = dataclasses.replace(
    reuse, num_published=put(reuse.num_published), num_shared=put(reuse.num_shared)
  )
  return dataclasses.replace(
    state, pool=pool, block_tables=tables, num_pages=put(state.num_pages), reuse=reuse
  )


def share_pages(state: SchedulerState, grants: Draft) -> SchedulerState:
  """Gives newcomers the pages that others compute in this step; those have theirs by now."""
  nobody = state.queue.shape[0]
  mask = grants.admitted & (grants.source < nobody)

  def share(lane: jax.Array, carry: tuple) -> tuple:
    pool, tables = carry
    slot, count = grants.request[lane], grants.hits[lane]
    column = jnp.arange(tables.shape[1], dtype=jnp.int32)
    row = jnp.where(column < count, tables[grants.source[lane]], tables[slot])
    return prefix.acquire(pool, row, count), tables.at[slot].set(row)

  pool, tables = _for_each(mask, share, (state.pool, state.block_tables))
  return dataclasses.replace(state, pool=pool, block_tables=tables)


def _for_each(
  mask: jax.Array, body: Callable[[jax.Array, tuple], tuple], carry: tuple
) -> tuple:  # fmt: skip
  """`carry = body(lane, carry)` for the masked lanes, in order."""

  def step(state: tuple) -> tuple:
    left, carry = state
    lane = jnp.argmax(left).astype(jnp.int32)
    return left.at[lane].set(False), body(lane, carry)

  return lax.while_loop(lambda state: jnp.any(state[0]), step, (mask, carry))[1]
