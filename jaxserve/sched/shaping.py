"""Rules that give a step its shape: as long as a latency target allows, as wide as a bucket.

  predicted    T(n, p, r) = max(token_ms n, weights_ms) + pair_ms p + kv_ms r, see `cost.step_ms`
  kept         the longest prefix of the prompts in order of service whose T <= itl_target_ms;
               the next one takes the most tokens that still keep it, those behind it none
  edge         the largest bucket that the step fills; the newest chunks lose what is above it

`tests/testing/own_policy_oracles.py` has the same rules as plain loops.
"""

import jax
import jax.numpy as jnp

from jaxserve import cost
from jaxserve.config import token_buckets
from jaxserve.sched.policy import Context, Draft, Rule, stateless
from jaxserve.sched.rules import Pages, ceil_div, prefix_sum, replace

# Doubled query-key pairs are summed in two int32 limbs of this base: exact, whatever the order.
_BASE_BITS = 10


def keep_under_target() -> Rule:
  """Lowers what prompts ask for, so that the step's predicted time keeps `itl_target_ms`.

  What is granted already (decodes, so `serve(decodes)` comes first) counts with its tokens and its
  resident KV and is never held back. Then prompts, running ones first, in order of service. Where
  nothing is granted yet, the first of them gets `min_chunk` tokens whatever the target, so a
  prompt always moves on; nobody overtakes a prompt that was cut. Without chunked prefill a
  prompt is held back whole instead of cut, and `min_chunk` is all it needs.

  Hyper-parameters, f32[]: itl_target_ms, min_chunk in tokens, and the terms of `cost.step_terms`.
  Exact for budgets up to 2^20 tokens. Cost: four prefix sums and log2(max_budget) predictions.
  """

  def apply(draft: Draft, context: Context) -> Draft:
    asks = (draft.running | draft.waiting) & ~draft.preempted & (draft.tokens == 0)
    need = jnp.where(asks, draft.need, 0)
    tokens = jnp.clip(draft.budget - (prefix_sum(need) - need), 0, need)
    counts = jnp.stack([tokens, *_pairs(tokens, draft.computed)])
    sums = prefix_sum(counts)
    served = draft.tokens > 0
    decodes = jnp.stack([draft.tokens, jnp.where(served, draft.computed, 0)])
    spent, resident = jnp.sum(decodes, axis=1, dtype=jnp.int32)
    kept = (sums[0] == 0) | _keeps(sums, spent, resident, context)
    first = jnp.sum(kept, dtype=jnp.int32)  # the first that does not fit; Q if all of them do
    lane = jnp.arange(need.shape[0])
    own = jnp.where((lane == first)[None], jnp.stack([tokens, draft.computed, *(sums - counts)]), 0)
    most, prefix, *before = jnp.sum(own, axis=1, dtype=jnp.int32)
    widest = _widest(most, prefix, jnp.stack(before), spent, resident, context)
    least = jnp.maximum(jnp.asarray(context.params.policy["min_chunk"], jnp.int32), 1)
    alone = spent + before[0] == 0
    part = jnp.where(alone, jnp.maximum(widest, jnp.minimum(least, most)), widest)
    whole = jnp.where(alone, draft.need, 0)
    cut = jnp.where(context.params.chunked_prefill, part, whole)
    lowered = jnp.where(lane < first, draft.need, jnp.where(lane == first, cut, 0))
    return replace(draft, need=jnp.where(asks, lowered, draft.need))

  return stateless(apply)


def hold_newcomers() -> Rule:
  """Cuts newcomers that the prefix cache lets begin late until the step keeps `itl_target_ms`.

  `keep_under_target` measured them as if they began at 0; a token late in a prompt takes longer.
  It follows `admit`. Without a prefix cache there is nothing to do.
  """

  def apply(draft: Draft, context: Context) -> Draft:
    if context.state.reuse is None:
      return draft
    chunk = jnp.where(draft.decoding, 0, draft.tokens)
    ask = replace(
      draft, tokens=draft.tokens - chunk, need=chunk, budget=draft.budget + jnp.sum(chunk)
    )
    kept = keep_under_target().apply(ask, (), context)[0].need
    return _cut(draft, jnp.minimum(chunk, kept), context, "chunk")

  return stateless(apply)


def _pairs(chunk: jax.Array, prefix: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Twice the query-key pairs of a chunk, c*(2*prefix + c), as (high, low) limbs, i32."""
  keys = 2 * prefix + chunk
  return chunk * (keys >> _BASE_BITS), chunk * (keys & ((1 << _BASE_BITS) - 1))


def _keeps(sums: jax.Array, spent: jax.Array, resident: jax.Array, context: Context) -> jax.Array:
  """Whether a step keeps the target.

  Args:
    sums: i32[3, ...], tokens of prompts and the limbs of their doubled pairs.
    spent: i32[], tokens of decodes.
    resident: i32[], tokens that the decodes have cached.
    context: has the hyper-parameters.

  Returns:
    bool[...].
  """
  tokens, high, low = sums
  high, low = high + (low >> _BASE_BITS), low & ((1 << _BASE_BITS) - 1)
  # The products are exact, so this is one rounding.
  pairs = high.astype(jnp.float32) * (1 << _BASE_BITS) / 2 + low.astype(jnp.float32) / 2
  terms = context.params.policy
  time = cost.step_ms(
    terms, (spent + tokens).astype(jnp.float32), pairs, resident.astype(jnp.float32)
  )
  return time <= terms["itl_target_ms"]


def _widest(
  most: jax.Array, prefix: jax.Array, before: jax.Array, spent: jax.Array, resident: jax.Array,
  context: Context,
) -> jax.Array:  # fmt: skip
  """i32[]: the widest chunk of at most `most` tokens that keeps the target, found bit by bit.

  The root of the quadratic would do, but for its rounding: the prediction only rises with the
  chunk, so a search finds what a token-by-token loop does.
  """
  chunk = jnp.zeros_like(most)
  for bit in reversed(range(context.config.max_budget.bit_length())):
    wider = chunk + (1 << bit)
    sums = before + jnp.stack([wider, *_pairs(wider, prefix)])
    keeps = _keeps(sums, spent, resident, context)
    chunk = jnp.where((wider <= most) & keeps, wider, chunk)
  return chunk


def trim_to_bucket(*, pages: Pages = "chunk", buckets: tuple[int, ...] | None = None) -> Rule:
  """Cuts the newest chunks of a step so that its tokens fill a token bucket, see `token_buckets`.

  It follows the rules that grant. The step is cut to the largest bucket below it that holds all
  decodes and one prompt token, unless that costs more than it saves: a cut chunk needs one more
  step, so a bucket of which at most `max_padding` would stay empty is left as it is. Never cut
  are decodes, a step that preempts (its victims made room for all of it) and, without chunked
  prefill, anything. Pages and seats that are not needed any more are given back.

  Hyper-parameter, f32[]: max_padding, a fraction of the bucket.

  Args:
    pages: as in the `admit` before it.
    buckets: token counts that the engine is compiled for, where they are not those of
      `token_buckets(max_budget)`; the budget in use always counts as one.
  """

  def apply(draft: Draft, context: Context) -> Draft:
    config, params = context.config, context.params
    chunk = jnp.where(draft.decoding, 0, draft.tokens)
    total, chunks = jnp.sum(jnp.stack([draft.tokens, chunk]), axis=1, dtype=jnp.int32)
    edges = jnp.asarray(buckets or token_buckets(config.max_budget), jnp.int32)
    edges = jnp.append(edges, jnp.asarray(params.budget, jnp.int32))
    below = jnp.max(jnp.where(edges <= total, edges, 0))
    above = jnp.min(jnp.where(edges >= total, edges, config.max_budget))
    padding = (above - total).astype(jnp.float32)
    pays = padding > params.policy["max_padding"] * above.astype(jnp.float32)
    pays &= (below > total - chunks) & params.chunked_prefill & ~jnp.any(draft.preempted)
    room = jnp.where(pays, below - (total - chunks), chunks)
    kept = jnp.clip(room - (prefix_sum(chunk) - chunk), 0, chunk)
    return _cut(draft, kept, context, pages)

  return stateless(apply)


def _cut(draft: Draft, kept: jax.Array, context: Context, pages: Pages) -> Draft:
  """The draft with chunks, i32[Q], of which the last were cut; gives back pages and seats.

  Those behind a chunk that was cut have none any more, so nobody misses what a cut one was to
  compute for others.
  """
  tokens = jnp.where(draft.decoding, draft.tokens, kept)
  admitted = draft.admitted & (tokens > 0)
  given = jnp.where(draft.admitted & ~admitted, 0, draft.pages)
  if pages == "chunk":
    demand = ceil_div(draft.computed + tokens, context.config.cache.page_size) - draft.held
    given = jnp.clip(demand, 0, given)
  return replace(
    draft,
    tokens=tokens,
    pages=given,
    admitted=admitted,
    budget=draft.budget + jnp.sum(draft.tokens - tokens),
    free=draft.free + jnp.sum(draft.pages - given),
  )
