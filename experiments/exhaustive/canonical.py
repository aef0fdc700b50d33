"""One name for states that differ only in what no rule can read, so that they are finitely many.

  arrival      its rank among the live requests, from 1; 0 for a free slot. Only equality with the
               number in a decision and the order of the queue are ever read
  counters     num_submitted follows the ranks; preemptions and evictions are reports: 0
  free slots   `submit` overwrites all of a slot: 0
  memory       kept, but for what SGLang's policy never reads: outputs left of who is no member of
               the decode set, and a chunk slot whose request does not run
  pages        are interchangeable: numbered as they come up in the block tables, then as they will
               be handed out; what lies behind a length is 0
  prefix pool  the log without entries that do not count, the index sorted: its sets have more ways
               than a tiny pool has pages, so which way an entry has cannot matter

Slots are not renamed: that the lowest free one is taken is part of what is checked.
`tests/sched/exhaustive_test.py` has whole lives with and without this and compares their decisions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pytree import pytree_dataclass
from jaxserve.sched import sglang_round
from jaxserve.types import PagePool, PrefixPool, SchedulerState, Status

LOST = -1
"""The submit number, in a decision, of a request that has gone and whose slot is taken again."""


@pytree_dataclass
class InFlight:
  """A step that was scheduled and not committed: what `commit` reads of its decision."""

  live: jax.Array
  samples: jax.Array
  arrival: jax.Array


@pytree_dataclass
class Node:
  """A state of the search."""

  state: SchedulerState
  in_flight: InFlight


def canonical(node: Node) -> Node:
  """The node under its one name."""
  state = node.state
  live = state.status != Status.FREE
  older = live[None, :] & (state.arrival[None, :] < state.arrival[:, None])
  rank = jnp.where(live, jnp.sum(older, axis=1, dtype=jnp.int32) + 1, 0)
  same = node.in_flight.samples & (node.in_flight.arrival == state.arrival)
  arrival = jnp.where(same, rank, LOST)
  columns = {
    name: jnp.where(live, getattr(state, name), 0)
    for name in ("priority", "num_prompt", "num_known", "num_computed", "max_total",
                 "num_in_flight", "num_pages")
  }  # fmt: skip
  held = jnp.arange(state.block_tables.shape[1])[None] < columns["num_pages"][:, None]
  held &= live[:, None]
  state = dataclasses.replace(
    state,
    **columns,
    arrival=rank,
    await_host=state.await_host & live,
    num_preemptions=jnp.zeros_like(rank),
    num_submitted=jnp.sum(live, dtype=jnp.int32) + 1,
    num_drafts=None if state.num_drafts is None else jnp.where(live, state.num_drafts, 0),
    policy=_memory(state),
  )
  state = _renamed(_forgotten(state, live), held)
  return Node(state=state, in_flight=dataclasses.replace(node.in_flight, arrival=arrival))


def _memory(state: SchedulerState) -> Any:
  """What the policy remembers, as far as it reads it."""
  memory = state.policy
  if not isinstance(memory, sglang_round.Memory):
    return memory
  nobody = state.status.shape[0]
  runs = (state.status == Status.RUNNING).at[memory.chunked].get(mode="fill", fill_value=False)
  return dataclasses.replace(
    memory,
    chunked=jnp.where(runs, memory.chunked, nobody),
    left=jnp.where(memory.role == sglang_round.MEMBER, memory.left, 0),
  )


def _forgotten(state: SchedulerState, live: jax.Array) -> SchedulerState:
  """Without digests that do not count."""
  if state.reuse is None:
    return state
  names = ("num_digests", "num_full", "num_published", "num_shared")
  columns = {name: jnp.where(live, getattr(state.reuse, name), 0) for name in names}
  digests = state.reuse.digests
  counts = jnp.arange(digests.shape[1])[None] < columns["num_digests"][:, None]
  digests = jnp.where(counts[:, :, None], digests, jnp.zeros_like(digests))
  reuse = dataclasses.replace(
    state.reuse, **columns, digests=digests, reads=state.reuse.reads & live
  )
  return dataclasses.replace(state, reuse=reuse)


def _renamed(state: SchedulerState, held: jax.Array) -> SchedulerState:
  """Pages in order of appearance."""
  tables = jnp.where(held, state.block_tables, -1)
  lists = free_lists(state.pool)
  label = _labels(jnp.concatenate([tables.ravel(), *lists]), state.pool)
  named = jnp.where(held, label.at[state.block_tables].get(mode="clip"), 0)
  if isinstance(state.pool, PrefixPool):
    pool = _renamed_prefix(state.pool, label, *lists)
  else:
    stack = state.pool.free_pages
    there = jnp.arange(stack.shape[0]) < state.pool.num_free
    stack = jnp.where(there, label.at[stack].get(mode="clip"), 0)
    pool = PagePool(free_pages=stack, num_free=state.pool.num_free)
  return dataclasses.replace(state, block_tables=named, pool=pool)


def free_lists(pool: PagePool | PrefixPool) -> tuple[jax.Array, ...]:
  """Free pages in the order in which they will be handed out, -1 for no page.

  Those without content, then, with a prefix cache, those with content.
  """
  prefix = isinstance(pool, PrefixPool)
  stack, count = (pool.empty, pool.num_empty) if prefix else (pool.free_pages, pool.num_free)
  at = jnp.arange(stack.shape[0])
  first = jnp.where(at < count, stack, -1)[::-1]
  if not prefix:
    return (first,)
  at = jnp.arange(pool.log.shape[0])
  page = pool.log
  counts = (at >= pool.head) & (at < pool.tail)
  counts &= (pool.refs.at[page].get(mode="clip") == 0) & (pool.cell.at[page].get(mode="clip") == at)
  counts &= pool.digests.at[page, 0].get(mode="clip") != 0
  place = jnp.where(counts, jnp.cumsum(counts) - 1, at.shape[0])
  size = pool.refs.shape[0]
  logged = jnp.full(size, -1, jnp.int32).at[place].set(page, mode="drop")
  return first, logged


def _labels(appearance: jax.Array, pool: PagePool | PrefixPool) -> jax.Array:
  """i32[N]: the rank of each page in a list that has all of them."""
  size = pool.refs.shape[0] if isinstance(pool, PrefixPool) else pool.free_pages.shape[0]
  at, page = jnp.arange(appearance.shape[0]), jnp.arange(size)
  found = appearance[None, :] == page[:, None]
  first = jnp.min(jnp.where(found, at[None], at.shape[0]), axis=1)
  return jnp.sum(first[None, :] < first[:, None], axis=1, dtype=jnp.int32)


def _renamed_prefix(
  pool: PrefixPool, label: jax.Array, empty: jax.Array, logged: jax.Array
) -> PrefixPool:
  size, sets = pool.refs.shape[0], pool.index.shape[0]

  def names(pages: jax.Array) -> jax.Array:
    return jnp.where(pages >= 0, label.at[pages].get(mode="clip"), 0)

  digests = pool.digests
  digests = jnp.where(digests[:, :1] != 0, digests, jnp.zeros_like(digests))
  digests = jnp.zeros_like(digests).at[label].set(digests)
  known, home = digests[:, 0] != 0, (digests[:, 1] & (sets - 1)).astype(jnp.int32)
  page = jnp.arange(size, dtype=jnp.int32)
  earlier = (home[:, None] == home[None]) & known[None] & (page[None, :] < page[:, None])
  way = jnp.sum(earlier, axis=1, dtype=jnp.int32)
  index = jnp.full_like(pool.index, size)
  index = index.at[jnp.where(known, home, sets), way].set(page, mode="drop")
  count = jnp.sum(logged >= 0, dtype=jnp.int32)
  log = jnp.zeros_like(pool.log).at[:size].set(names(logged))
  cell = jnp.zeros_like(pool.cell)
  cell = cell.at[jnp.where(logged >= 0, names(logged), size)].set(page, mode="drop")
  return PrefixPool(
    refs=jnp.zeros_like(pool.refs).at[label].set(pool.refs),
    digests=digests,
    index=index,
    empty=names(empty)[::-1],
    num_empty=pool.num_empty,
    log=log,
    cell=cell,
    head=jnp.zeros_like(pool.head),
    tail=count,
    num_free=pool.num_free,
    num_evicted=jnp.zeros_like(pool.num_evicted),
  )
