"""One scheduling step: the policy decides, this file carries it out."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve import cache
from jaxserve.config import SchedulerConfig
from jaxserve.sched import drafts, lifecycle, policies, reuse
from jaxserve.sched.policy import Context, Draft, begin
from jaxserve.types import Decision, PagePool, SchedulerParams, SchedulerState, Status


def schedule(
  state: SchedulerState, params: SchedulerParams, config: SchedulerConfig
) -> tuple[SchedulerState, Decision]:
  """Decides one step and advances the state as if it had run.

  Progress is counted here, before execution: num_computed by the tokens granted, num_known by the
  output that a request reaching its last known token will yield. So the next step can be scheduled
  and dispatched while this one runs.

  Args:
    state: not modified.
    params: numbers one may sweep; budget at most config.max_budget.
    config: static.

  Returns:
    (state, Decision).

  Cost: O(Q + pages handed out), and O(Q + M) for each request preempted.
  Source: vLLM V1 `Scheduler.schedule`.
  """
  state = reuse.publish(state)
  context = Context(state, params, config)
  grants, memory = policies.rule_of(config).apply(begin(context), state.policy, context)
  tokens, pages, admitted, preempted, cached, verified = _by_slot(grants, config)
  start = jnp.where(preempted, 0, state.num_computed)
  start = start if cached is None else start + cached
  state = _preempt(state, preempted)
  known = state.num_known if verified is None else state.num_known + verified
  samples = (tokens > 0) & (start + tokens == known)
  decision = Decision(
    order=_order(grants, config),
    num_scheduled=jnp.sum(tokens > 0, dtype=jnp.int32),
    num_tokens=jnp.sum(tokens, dtype=jnp.int32),
    tokens=tokens,
    start=start,
    new_pages=pages,
    admitted=admitted,
    preempted=preempted,
    samples=samples,
    arrival=state.arrival,
    drafts=verified,
  )
  if cached is None:
    state = _hand_out_pages(state, grants, config)
  else:
    state, decision = _reuse_pages(state, grants, decision, cached, config)
  state = dataclasses.replace(
    state,
    status=jnp.where(admitted, int(Status.RUNNING), state.status),
    num_computed=start + tokens,
    num_known=state.num_known + samples.astype(jnp.int32),
    num_in_flight=state.num_in_flight + samples.astype(jnp.int32),
    num_pages=state.num_pages + pages,
    queue=state.queue if grants.queue is None else grants.queue,
    policy=memory,
  )
  return state, decision


def _by_slot(
  grants: Draft, config: SchedulerConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
  """Tokens, pages, admitted, preempted, tokens found in the prefix cache, drafts; each [Q].

  By request instead of by order of service; None for what there is not.
  """
  lane = jnp.arange(config.max_requests, dtype=jnp.int32)
  slot = jnp.where(grants.request < config.max_requests, grants.request, config.max_requests + lane)
  columns = [
    grants.tokens, grants.pages, grants.admitted.astype(jnp.int32),
    grants.preempted.astype(jnp.int32),
  ]  # fmt: skip
  if grants.hits is not None:
    columns.append(jnp.where(grants.admitted & (grants.hits > 0), grants.computed, 0))
  if grants.extra is not None:
    columns.append(grants.extra)
  stacked = jnp.stack(columns, axis=-1)
  stacked = jnp.zeros_like(stacked).at[slot].set(stacked, mode="drop", unique_indices=True)
  cached = None if grants.hits is None else stacked[:, 4]
  verified = None if grants.extra is None else stacked[:, -1]
  return stacked[:, 0], stacked[:, 1], stacked[:, 2] > 0, stacked[:, 3] > 0, cached, verified


def _order(grants: Draft, config: SchedulerConfig) -> jax.Array:
  """i32[R]: the scheduled requests in order of service, then Q."""
  scheduled = grants.tokens > 0
  lane = jnp.arange(config.max_requests, dtype=jnp.int32)
  row = jnp.where(scheduled, jnp.cumsum(scheduled, dtype=jnp.int32) - 1, config.max_num_seqs + lane)
  order = jnp.full(config.max_num_seqs, config.max_requests, jnp.int32)
  return order.at[row].set(grants.request, mode="drop", unique_indices=True)


def _preempt(state: SchedulerState, preempted: jax.Array) -> SchedulerState:
  """Victims lose pages and progress, keep their outputs, and wait again at their place."""
  state = lifecycle.release_pages(state, preempted, last_first=True)
  state = drafts.drop(state, preempted)
  return dataclasses.replace(
    state,
    status=jnp.where(preempted, int(Status.WAITING), state.status),
    num_computed=jnp.where(preempted, 0, state.num_computed),
    num_preemptions=state.num_preemptions + preempted.astype(jnp.int32),
  )


def _reuse_pages(
  state: SchedulerState, grants: Draft, decision: Decision, cached: jax.Array,
  config: SchedulerConfig,
) -> tuple[SchedulerState, Decision]:  # fmt: skip
  """`_hand_out_pages` with a prefix cache: hits first, so that no page of theirs is evicted."""
  before = state.pool.num_evicted
  state = _hand_out_pages(reuse.take_hits(state, grants), grants, config)
  state = reuse.share_pages(state, grants)
  # A draft may be wrong: what its page holds counts once the draft is accepted.
  sure = decision.tokens if decision.drafts is None else decision.tokens - decision.drafts
  full = (decision.start + sure) // config.cache.page_size
  full = jnp.where(decision.tokens > 0, full, state.reuse.num_full)
  state = dataclasses.replace(state, reuse=dataclasses.replace(state.reuse, num_full=full))
  evicted = state.pool.num_evicted - before
  return state, dataclasses.replace(decision, cached=cached, evicted=evicted)


def _hand_out_pages(
  state: SchedulerState, grants: Draft, config: SchedulerConfig
) -> SchedulerState:
  """Pops the pages of the step and appends them to the block tables, in order of service."""
  # A request's tokens may straddle one page more than they fill.
  size = config.max_budget // config.cache.page_size + config.max_num_seqs
  size = min(config.cache.num_pages, size)
  ends = jnp.cumsum(grants.pages, dtype=jnp.int32)

  def hand_out(start: jax.Array, carry: tuple) -> tuple:
    """Pages [start, start + size) of the step."""
    pool, tables = carry
    return _hand_out_some(state, grants, ends, start, size, pool, tables)

  # One round, but for policies that allot whole prompts.
  rounds = (ends[-1] + (size - 1)) // size
  carry = state.pool, state.block_tables
  pool, tables = lax.fori_loop(0, rounds, lambda i, c: hand_out(i * size, c), carry)
  return dataclasses.replace(state, pool=pool, block_tables=tables)


def _hand_out_some(
  state: SchedulerState, grants: Draft, ends: jax.Array, start: jax.Array, size: int,
  pool: PagePool, tables: jax.Array,
) -> tuple[PagePool, jax.Array]:  # fmt: skip
  num_requests = state.queue.shape[0]
  lane = jnp.arange(size, dtype=jnp.int32)
  live = start + lane < ends[-1]
  pool, ids = cache.allocate(pool, jnp.minimum(ends[-1] - start, size), size)
  index = jnp.searchsorted(ends, start + lane, side="right").astype(jnp.int32)
  request = grants.request.at[index].get(mode="fill", fill_value=num_requests)
  offset = start + lane - (ends - grants.pages).at[index].get(mode="fill", fill_value=0)
  column = state.num_pages.at[request].get(mode="fill", fill_value=0) + offset
  request = jnp.where(live, request, num_requests + lane)
  return pool, tables.at[request, column].set(ids, mode="drop", unique_indices=True)
