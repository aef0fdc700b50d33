"""The rules that policies are composed of, each in closed form: prefix sums, no loop over requests.

  grants       g_i = clip(budget - sum_{j<i} need_j, 0, need_i)
  page demand  d_i = max(ceil((computed_i + g_i) / S) - held_i, 0)
  survivors    the first n running requests, n the largest with
               sum_{j<n} d_j <= free + sum_{j>=n} held_j
  admitted     the longest prefix of the waiting queue that budget, seats and pages allow

`tests/testing/oracle.py` has the same rules as plain loops.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxserve.config import SchedulerConfig
from jaxserve.sched import newcomers, reuse
from jaxserve.sched.newcomers import Cap
from jaxserve.sched.policy import Context, Draft, Rule, stateless

Pages = Literal["chunk", "prompt", "limit"]


def running(draft: Draft) -> jax.Array:
  """Who runs."""
  return draft.running


def decodes(draft: Draft) -> jax.Array:
  """Who runs and has one token to compute."""
  return draft.decoding


def prompts(draft: Draft) -> jax.Array:
  """Who runs and is in the middle of its prompt."""
  return draft.running & ~draft.decoding


def cap_by_threshold() -> Rule:
  """need_i = min(need_i, threshold); a lone request is spared where `cap_when_alone` is off.

  Source: vLLM `long_prefill_token_threshold`.
  """

  def apply(draft: Draft, context: Context) -> Draft:
    params = context.params
    alone = jnp.sum(draft.running | draft.waiting, dtype=jnp.int32) == 1
    threshold = params.long_prefill_token_threshold
    capped = (threshold > 0) & (params.cap_when_alone | ~alone)
    need, extra = jnp.where(capped, jnp.minimum(draft.need, threshold), draft.need), draft.extra
    if extra is not None:
      extra = jnp.where(capped, jnp.minimum(extra, threshold - need), extra)
    return replace(draft, need=need, extra=extra)

  return stateless(apply)


def cap_by_stage() -> Rule:
  """need_i = min(need_i, c(computed_i)), c falling from `high` to `low` in equal `stages`.

  Stage k covers computed tokens [k, k + 1) * ceil(max_tokens / stages); its cap is rounded down to
  a multiple of min(32, low). Source: Sarathi-Serve, dynamic chunk schedule.
  """

  def apply(draft: Draft, context: Context) -> Draft:
    return replace(draft, need=jnp.minimum(draft.need, stage_cap(draft.computed, context)))

  return stateless(apply)


def stage_cap(computed: jax.Array, context: Context) -> jax.Array:
  """The cap of `cap_by_stage` at so many computed tokens, i32 of any shape."""
  low, high, stages, max_tokens = (
    jnp.asarray(context.params.policy[name], jnp.int32)
    for name in ("low", "high", "stages", "max_tokens")
  )
  stage = jnp.clip(computed // ceil_div(max_tokens, stages), 0, stages - 1)
  size = high - (high - low) * stage // jnp.maximum(stages - 1, 1)
  unit = jnp.minimum(32, low)
  return jnp.maximum(size // unit * unit, 1)


def serve(who: Callable[[Draft], jax.Array]) -> Rule:
  """Grants what the chosen requests need, in order, out of what is left of the budget.

  It hands out no pages: `fit_pages` must follow, unless the chosen were admitted with the pages of
  their whole prompt.
  """

  def apply(draft: Draft, context: Context) -> Draft:
    need = jnp.where(who(draft) & ~draft.preempted, draft.need, 0)
    need_sum = prefix_sum(need)
    tokens = jnp.clip(draft.budget - (need_sum - need), 0, need)
    left = jnp.maximum(draft.budget - need_sum[-1], 0)
    return replace(draft, tokens=draft.tokens + tokens, budget=left)

  return stateless(apply)


def fit_pages(evict_when_full: bool = False) -> Rule:
  """Gives what runs its pages; the tail of the running order is preempted until they suffice.

  Args:
    evict_when_full: a decode also evicts when no page is free and it needs none, as Sarathi-Serve
      and vLLM V0 do; but not itself, if it is the only one that holds pages.
  """

  def apply(draft: Draft, context: Context) -> Draft:
    page_size = context.config.cache.page_size
    served = draft.running & (draft.tokens > 0)
    demand = ceil_div(draft.computed + draft.tokens, page_size) - draft.held
    demand = jnp.where(served, jnp.maximum(demand, 0), 0)
    held = jnp.where(draft.running, draft.held, 0)
    demand_sum, held_sum = prefix_sum(jnp.stack([demand, held]))
    wanted = demand_sum
    if evict_when_full:
      wanted = jax.lax.cummax(jnp.where(served, demand_sum - demand + jnp.maximum(demand, 1), 0))
    if context.state.reuse is not None:
      held = reuse.owned(draft, context, held, wanted[-1] > draft.free)
      held_sum = prefix_sum(held)
    others = draft.free + held_sum[-1] - held_sum
    fits = wanted <= others
    if evict_when_full:
      # Nobody is left to make room for the first: alone, it would evict itself for ever.
      fits |= (jnp.arange(fits.shape[0]) == 0) & (demand_sum <= others)
    preempted = draft.running & ~fits
    pages = jnp.where(preempted, 0, demand)
    lost = jnp.stack([held, draft.tokens, demand])
    freed, unspent, undone = jnp.sum(jnp.where(preempted[None], lost, 0), axis=1)
    return replace(
      draft,
      tokens=jnp.where(preempted, 0, draft.tokens),
      pages=draft.pages + pages,
      preempted=draft.preempted | preempted,
      budget=draft.budget + unspent,
      free=draft.free + freed - (demand_sum[-1] - undone),
    )

  return stateless(apply)


def admit(
  *, pages: Pages = "chunk", whole: bool = False, only_if_idle: bool = False, cap: Cap | None = None
) -> Rule:
  """Admits the longest prefix of the waiting queue that fits; nobody in a step that preempts.

  With a prefix cache it does so one by one, see `newcomers`.

  Args:
    pages: what a newcomer is given: pages of its first chunk, of its whole prompt, or of the
      longest request there may be. The first leaves to `SchedulerConfig.reserve` what must look
      free beyond that.
    whole: prompts are admitted only into a step that holds them whole, as with
      `chunked_prefill` off; but what exceeds the budget, as a preempted request with many outputs
      may, is cut, so `serve(prompts)` must go on with it.
    only_if_idle: only when nothing runs.
    cap: most tokens of a step by tokens computed, where what is asked for holds only from 0 on.
  """

  def apply(draft: Draft, context: Context) -> Draft:
    params, config = context.params, context.config
    if context.state.reuse is not None:
      return newcomers.admit(draft, context, pages, whole, only_if_idle, cap)
    lane = jnp.arange(draft.need.shape[0])
    candidate = draft.waiting & ~draft.idle
    need = jnp.where(candidate, draft.need, 0)
    whole_pages = _whole_pages(draft, candidate, pages, context)
    # One pass for the sums that do not depend on each other: they are most of a step's cost.
    need_sum, place, whole_sum = prefix_sum(
      jnp.stack([need, candidate.astype(jnp.int32), whole_pages])
    )
    tokens = jnp.clip(draft.budget - (need_sum - need), 0, need)
    given, wanted = whole_pages, whole_sum
    if pages == "chunk":
      given, wanted = _chunk_pages(tokens, candidate, whole_pages, whole_sum, config)
    seats = jnp.sum(draft.running & ~draft.preempted, dtype=jnp.int32)
    taken = seats + place
    spare = jnp.where(taken > 1, params.watermark_pages, 0)
    ok = (tokens > 0) & (taken <= params.max_num_seqs) & (wanted + spare <= draft.free)
    entire = (tokens == need) | (need > params.budget)
    ok &= entire if whole else (params.chunked_prefill | entire)
    refused = jnp.where(candidate & ~ok, lane, lane.shape[0])
    closed = jnp.any(draft.preempted)
    if only_if_idle:
      closed |= jnp.any(draft.running)
    admitted = candidate & (lane < jnp.where(closed, 0, jnp.min(refused)))
    tokens, given = jnp.where(admitted, tokens, 0), jnp.where(admitted, given, 0)
    return replace(
      draft,
      tokens=draft.tokens + tokens,
      pages=draft.pages + given,
      admitted=draft.admitted | admitted,
      budget=draft.budget - jnp.sum(tokens),
      free=draft.free - jnp.sum(given),
    )

  return stateless(apply)


def _whole_pages(draft: Draft, candidate: jax.Array, pages: Pages, context: Context) -> jax.Array:
  """i32[Q]: pages of each newcomer's whole prompt (or of the longest request there may be).

  With reserve="growth" also what the prompts already admitted still need, each at its place.
  """
  config = context.config
  if pages == "limit":
    return jnp.where(candidate, config.pages_per_request, 0)
  missing = ceil_div(draft.known, config.cache.page_size)
  own = jnp.where(candidate, missing, 0)
  if pages == "prompt" or config.reserve != "growth":
    return own
  promised = jnp.maximum(missing - draft.held - draft.pages, 0)
  return own + jnp.where(draft.running & ~draft.idle, promised, 0)


def _chunk_pages(
  tokens: jax.Array, candidate: jax.Array, whole: jax.Array, whole_sum: jax.Array,
  config: SchedulerConfig,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """(pages of each first chunk, pages that must be free for all up to it), i32[Q] each."""
  first = jnp.where(candidate, ceil_div(tokens, config.cache.page_size), 0)
  if config.reserve == "growth":
    return first, whole_sum
  first_sum = prefix_sum(first)
  return first, first_sum if config.reserve == "none" else first_sum - first + whole


def prefix_sum(x: jax.Array) -> jax.Array:
  """Inclusive sums along the last axis, i32."""
  return jnp.cumsum(x, axis=-1, dtype=jnp.int32)


def ceil_div(a: jax.Array, b: jax.Array | int) -> jax.Array:
  """ceil(a / b) of integers."""
  return (a + (b - 1)) // b


def replace(draft: Draft, **fields: Any) -> Draft:
  """The draft with other fields."""
  return dataclasses.replace(draft, **fields)
