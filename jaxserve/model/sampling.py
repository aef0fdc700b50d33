"""Sampling without a sort over the vocabulary, one row at a time.

A row's token depends on nothing but its own logits, options and position: every reduction has the
shape of one row, whatever the batch, and the one random number of a row comes from its own key.
Greedy rows skip the work entirely.

A restriction (top-k, top-p) keeps the tokens whose logit reaches a threshold. The threshold is
found exactly, by bisection over the bits of the logit, among the best groups of the vocabulary
where it is certain to lie there; ties at the threshold are all kept. The token is then drawn by
inverting the cumulative distribution in the order of the vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pytree import pytree_dataclass
from jaxserve.types import SamplingTable, StepOutput
from jaxserve.types.sampling import FEW_TOP, MAX_TOP

# Entries whose maximum is taken first, when looking for the largest of a vocabulary.
GROUP = 64
# Groups in which a threshold is looked for first: a sixth of a vocabulary of 49,152.
NEAR_GROUPS = 128


@pytree_dataclass
class RowOptions:
  """Options of the rows of a batch, or of one row; as in `SamplingTable`.

  temperature: f32[...].
  top_k: i32[...].
  top_p: f32[...].
  min_p: f32[...].
  seed: u32[...].
  position: i32[...], position that the sampled token will have in its request.
  num_top: i32[...].
  request: i32[...].
  edited: bool[...], the request changes its logits.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  seed: jax.Array
  position: jax.Array
  num_top: jax.Array
  request: jax.Array
  edited: jax.Array


# f32[V] logits and the options of their row to the logits from which its token is chosen.
Edit = Callable[[jax.Array, RowOptions], jax.Array]


def row_options(table: SamplingTable, requests: jax.Array, positions: jax.Array) -> RowOptions:
  """Options of the rows that serve `requests` i32[B]; a padded row is greedy."""
  rows = lambda column: column.at[requests].get(mode="fill", fill_value=0)
  fields = ("temperature", "top_k", "top_p", "min_p", "seed", "num_top")
  return RowOptions(
    **{name: rows(getattr(table, name)) for name in fields},
    position=positions, request=requests, edited=rows(table.edits.active),
  )  # fmt: skip


def sample(
  logits: jax.Array, options: RowOptions, edit: Edit = lambda logits, options: logits
) -> StepOutput:
  """Draws a token for every row.

  Equivalent to: edit the logits where the row asks for it; divide by the temperature; drop tokens
  less likely than min_p times the likeliest; keep the top_k; of those, keep the fewest that hold
  top_p of their mass, at least one; draw.

  Args:
    logits: f32[B, V].
    options: of B rows.
    edit: changes the logits of a row with `options.edited`.

  Returns:
    The tokens, their log-probabilities under `logits`, the largest logits, and the log-sum.

  Cost: greedy rows one pass over the logits; others a few passes over their own row, and 32 more
  per restriction, over NEAR_GROUPS groups or, where the distribution is flat, the whole row.
  """
  top_logits, top_ids = _alternatives(logits, options)

  def row(args: tuple[jax.Array, jax.Array, RowOptions]) -> jax.Array:
    logits, best, options = args
    logits = lax.cond(options.edited, lambda: edit(logits, options), lambda: logits)
    best = lax.cond(options.edited, lambda: jnp.argmax(logits).astype(best.dtype), lambda: best)
    greedy = (options.temperature <= 0) | (options.top_p <= 0) | (options.top_k == 1)
    return lax.cond(greedy, lambda: best, lambda: _draw(logits, options))

  best = top_ids[:, 0]
  tokens = lax.cond(
    jnp.any((options.temperature > 0) | options.edited),
    lambda: lax.map(row, (logits, best, options)),
    lambda: best,
  )
  chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
  log_sum = jax.nn.logsumexp(logits, axis=1)
  return StepOutput(
    tokens=tokens, logprobs=chosen - log_sum, top_ids=top_ids, top_logits=top_logits,
    log_sum=log_sum,
  )  # fmt: skip


def _alternatives(logits: jax.Array, options: RowOptions) -> tuple[jax.Array, jax.Array]:
  """The MAX_TOP best of every row, or the FEW_TOP best, filled up, if no row wants more."""
  most, few = (min(k, logits.shape[1]) for k in (MAX_TOP, FEW_TOP))

  def fewer() -> tuple[jax.Array, jax.Array]:
    values, ids = top_k(logits, few)
    room = ((0, 0), (0, most - few))
    return jnp.pad(values, room, constant_values=-jnp.inf), jnp.pad(ids, room)

  return lax.cond(jnp.any(options.num_top > few), lambda: top_k(logits, most), fewer)


def top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """`lax.top_k` in two levels, ties included: first the k best groups, then inside them.

  Args:
    logits: f32[B, V].
    k: static, at most V.

  Returns:
    (f32[B, k] values, falling; i32[B, k] indices; of equal values the lower index first).

  Cost: one pass over the logits; about a third of `lax.top_k` on XLA:CPU.
  """
  groups = _grouped(logits, -jnp.inf)
  count = min(k, groups.shape[1])
  _, best = lax.top_k(groups.max(axis=2), count)
  best = jnp.sort(best, axis=1)
  inside = jnp.take_along_axis(groups, best[:, :, None], axis=1).reshape(len(logits), -1)
  values, at = lax.top_k(inside, k)
  group = jnp.take_along_axis(best, at // GROUP, axis=1)
  return values, group * GROUP + at % GROUP


def _grouped(x: jax.Array, fill: float) -> jax.Array:
  """[..., V] as [..., ceil(V / GROUP), GROUP], filled up with `fill`."""
  missing = -x.shape[-1] % GROUP
  if missing:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=fill)
  return x.reshape(*x.shape[:-1], -1, GROUP)


def _draw(logits: jax.Array, options: RowOptions) -> jax.Array:
  """One token of f32[V] logits at a temperature above 0."""
  key = jax.random.fold_in(jax.random.key(options.seed), options.position)
  return invert(restricted(logits, options), jax.random.uniform(key))


def restricted(logits: jax.Array, options: RowOptions) -> jax.Array:
  """Weights of one row's tokens after all restrictions, the likeliest having 1.

  Args:
    logits: f32[V].
    options: of this row, with a temperature above 0.

  Returns:
    f32[V], 0 where a token is not to be drawn; not normalised.
  """
  search = _Search.over(logits)
  weights = jnp.exp((logits - logits.max()) / options.temperature)
  weights = jnp.where(weights >= options.min_p, weights, 0.0)

  k = options.top_k.astype(jnp.float32)
  weights = lax.cond(
    (options.top_k > 0) & (options.top_k < logits.shape[0]),
    lambda w: jnp.where(search.keeps(jnp.ones_like(w), k), w, 0.0),
    lambda w: w,
    weights,
  )
  return lax.cond(
    options.top_p < 1,
    lambda w: jnp.where(search.keeps(w, options.top_p * w.sum()), w, 0.0),
    lambda w: w,
    weights,
  )


def _sortable(x: jax.Array) -> jax.Array:
  """f32 as i32 in the same order; both zeros are 0."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@pytree_dataclass
class _Search:
  """One row's logits as integers of the same order, prepared for finding thresholds.

  order: i32[V].
  near: i32[n], the best groups, which hold every logit above `floor`.
  near_order: i32[n, GROUP], `order` in these groups.
  floor: i32[].
  """

  order: jax.Array
  near: jax.Array
  near_order: jax.Array
  floor: jax.Array

  @staticmethod
  def over(logits: jax.Array) -> "_Search":
    """Prepares f32[V] logits."""
    groups = _grouped(logits, -jnp.inf)
    count = min(NEAR_GROUPS, len(groups))
    best, near = lax.top_k(groups.max(axis=1), min(count + 1, len(groups)))
    floor = best[count] if count < len(groups) else jnp.float32(-jnp.inf)
    return _Search(
      order=_sortable(logits),
      near=near[:count],
      near_order=_sortable(groups[near[:count]]),
      floor=_sortable(floor),
    )

  def keeps(self, measure: jax.Array, target: jax.Array) -> jax.Array:
    """bool[V]: reaches the highest threshold at which `measure` adds up to `target`.

    Args:
      measure: f32[V], not negative.
      target: f32[], at most the sum of `measure` but for rounding.
    """
    near = _grouped(measure, 0.0)[self.near]
    found = jnp.sum(jnp.where(self.near_order > self.floor, near, 0.0)) >= target
    threshold = lax.cond(
      found,
      lambda: _threshold(self.near_order, near, target, self.floor + 1),
      lambda: _threshold(self.order, measure, target, jnp.min(self.order)),
    )
    return self.order >= threshold


def _threshold(
  order: jax.Array, measure: jax.Array, target: jax.Array, low: jax.Array
) -> jax.Array:
  """The highest i32 at which `measure`, where `order` reaches it, adds up to `target`.

  Bisection. What reaches `low` is taken to be enough; what exceeds `high` never is.
  """

  def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low, high = bounds
    # Without the overflow of (low + high) / 2.
    middle = (low >> 1) + (high >> 1) + (low & high & 1)
    enough = jnp.sum(jnp.where(order > middle, measure, 0.0)) >= target
    return jnp.where(enough, middle + 1, low), jnp.where(enough, high, middle)

  return lax.while_loop(lambda b: b[0] < b[1], halve, (low, jnp.max(order)))[0]


def invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
  """The first index at which the cumulative weight exceeds `uniform` in [0, 1) of the total.

  Args:
    weights: f32[V], not negative, at least one positive.
    uniform: f32[].

  Returns:
    i32[], an index of positive weight.
  """
  groups = _grouped(weights, 0.0)
  group, rest = _first_past(groups.sum(axis=1), uniform, None)
  index, _ = _first_past(groups[group], uniform, rest)
  return (group * GROUP + index).astype(jnp.int32)


def _first_past(
  weights: jax.Array, uniform: jax.Array, target: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Index of the first cumulative weight past the target, and what of the target is left there.

  Should rounding push the target past the total, the last positive weight is taken: an entry of
  weight zero never is.
  """
  total = jnp.cumsum(weights)
  target = uniform * total[-1] if target is None else target
  index = jnp.argmax((total > target) | (total == total[-1]))
  return index, target - jnp.where(index > 0, total[jnp.maximum(index - 1, 0)], 0.0)
