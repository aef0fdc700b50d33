"""Speculative decoding in the scheduler: a draft token is one more token that a decode may take.

A decode with d drafts is an ordinary chunk of 1 + d tokens. The step counts all of them as computed
and yields the drafts that the model agrees with and one token more; `settle` takes back the rest.

  asked        e_i = min(num_drafts_i, max_total_i - known_i - 1)
  reserved     after the one token of every decode and before any prompt (where requests have
               priorities: after everything that runs), clip(budget left - sum_{j<i} e_j, 0, e_i)
  verified     the reserved ones, as far as free pages reach: nobody is preempted for a draft

A request in the middle of its prompt has no drafts. Without `config.max_drafts` all of this is
nothing, not even to the trace.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.sched.policy import Context, Draft, Rule, stateless
from jaxserve.sched.rules import ceil_div, decodes, prefix_sum, prompts, replace, running, serve
from jaxserve.types import Decision, SchedulerState, Status


def serve_running() -> Rule:
  """`serve(running)`, and budget for drafts once every decode has its token."""
  everyone, decoding, others = serve(running), serve(decodes), serve(prompts)

  def apply(draft: Draft, context: Context) -> Draft:
    if draft.extra is None:
      return everyone.apply(draft, (), context)[0]
    if context.config.ordering != "fcfs":
      return _reserve(everyone.apply(draft, (), context)[0])
    draft = _reserve(decoding.apply(draft, (), context)[0])
    return others.apply(draft, (), context)[0]

  return stateless(apply)


def _reserve(draft: Draft) -> Draft:
  """Takes drafts out of what is left of the budget, in order of service."""
  assert draft.extra is not None, "without drafts nobody asks"
  asked = jnp.where(draft.decoding & (draft.tokens > 0), draft.extra, 0)
  asked_sum = prefix_sum(asked)
  extra = jnp.clip(draft.budget - (asked_sum - asked), 0, asked)
  return replace(draft, extra=extra, budget=jnp.maximum(draft.budget - asked_sum[-1], 0))


def verify() -> Rule:
  """Grants the drafts that `serve_running` reserved, as far as pages are free.

  It follows `fit_pages`, and may leave a request with the drafts that its own last page holds.
  """

  def apply(draft: Draft, context: Context) -> Draft:
    if draft.extra is None:
      return draft
    page_size = context.config.cache.page_size
    reserved = jnp.sum(draft.extra, dtype=jnp.int32)
    extra = jnp.where(draft.tokens > 0, draft.extra, 0)
    have, end = draft.held + draft.pages, draft.computed + draft.tokens
    wanted = jnp.where(extra > 0, jnp.maximum(ceil_div(end + extra, page_size) - have, 0), 0)
    fits = prefix_sum(wanted) <= draft.free
    extra = jnp.where(fits, extra, jnp.minimum(extra, have * page_size - end))
    pages = jnp.where(fits, wanted, 0)
    return replace(
      draft,
      extra=extra,
      tokens=draft.tokens + extra,
      pages=draft.pages + pages,
      budget=draft.budget + (reserved - jnp.sum(extra)),
      free=draft.free - jnp.sum(pages),
    )

  return stateless(apply)


def drop(state: SchedulerState, preempted: jax.Array) -> SchedulerState:
  """Victims lose their drafts; those of a step in flight still count until it is committed."""
  if state.num_drafts is None:
    return state
  lost = preempted & (state.num_in_flight == 0)
  return dataclasses.replace(state, num_drafts=jnp.where(lost, 0, state.num_drafts))


def settle(
  state: SchedulerState,
  decision: Decision,
  live: jax.Array,
  outputs: jax.Array | None,
  proposed: jax.Array | None,
) -> SchedulerState:
  """The part of `commit` that verification needs: accepted drafts are known, the rest undone.

  Args:
    state: before the step's outputs are counted as delivered.
    decision: of the step, with drafts.
    live: bool[Q], requests whose outputs count.
    outputs: i32[Q], see `lifecycle.commit`.
    proposed: i32[Q], see `lifecycle.commit`.
  """
  assert decision.drafts is not None and state.num_drafts is not None
  more = jnp.zeros_like(decision.drafts) if outputs is None else outputs - 1
  accepted = jnp.where(live, jnp.clip(more, 0, decision.drafts), 0)
  # A request preempted since has nothing to take back: it computes all of it again.
  kept = live & (state.status == Status.RUNNING)
  undone = jnp.where(kept, decision.drafts - accepted, 0)
  known, computed = state.num_known + accepted, state.num_computed - undone
  new = jnp.zeros_like(known) if proposed is None else proposed
  decoding = kept & (known - computed == 1)
  return dataclasses.replace(
    state,
    num_known=known,
    num_computed=computed,
    num_drafts=jnp.where(live, jnp.where(decoding, new, 0), state.num_drafts),
  )


def queries(
  tokens: jax.Array, is_decode: jax.Array, num_queries: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The queries of decodes one by one, a decode's token before its drafts.

  Args:
    tokens: i32[R], of the rows, drafts included.
    is_decode: bool[R].
    num_queries: static, most queries there may be.

  Returns:
    (how many queries, i32[]; row i32[num_queries]; offset in the row i32[num_queries]); the rows
    past the last query are R or garbage.
  """
  counts = jnp.where(is_decode, tokens, 0)
  ends = prefix_sum(counts)
  query = jnp.arange(num_queries, dtype=jnp.int32)
  rows = jnp.searchsorted(ends, query, side="right").astype(jnp.int32)
  offset = query - (ends - counts).at[rows].get(mode="fill", fill_value=0)
  return ends[-1], rows, offset
