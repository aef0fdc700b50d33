"""The head under speculation: a token at every draft's place, and which of them count.

A row with d drafts brings 1 + d hidden states, of the token before its drafts and of each draft.
The model's own token is drawn at each of these places, just as it would be without drafts: greedy,
or with the key of the place. Drafts are accepted as long as they are the tokens drawn; the first
token that is not takes the draft's place, and after d accepted ones there is one token more.

That is the rejection rule of Leviathan et al. 2023 for drafts that are not drawn at random (q has
all its mass on one token x): x is accepted with probability p(x), and what takes its place has
the distribution of p without x. So the outputs have the distribution p, and are even the very
tokens that the same seed gives without speculation.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import PlanShape
from jaxserve.model import dots, llama, logit_edits, ngram, sampling
from jaxserve.types import SamplingTable, StepOutput, StepPlan

# Rows of the array that `forward` hands to `verify`, i32[4, R (1 + K)].
REQUEST, POSITION, OFFSET, LIVE = range(4)


def places(plan: StepPlan, shape: PlanShape) -> tuple[jax.Array, jax.Array]:
  """Where the head is asked, row by row, a row's drafts after the token before them.

  Args:
    plan: with num_drafts.
    shape: static, of the plan.

  Returns:
    (i32[R (1 + K)] indices in T; i32[4, R (1 + K)] request, position of the token to be drawn,
    place in the row from 0, and 1 where the drawn token may count). Padding: 0, Q, 0, 0, 0.
  """
  assert plan.num_drafts is not None, "the shape has drafts"
  row = jnp.arange(shape.num_rows, dtype=jnp.int32)
  counts = jnp.where(row < plan.num_rows, 1 + plan.num_drafts, 0)
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  place = jnp.arange(shape.num_samples, dtype=jnp.int32)
  rows = jnp.searchsorted(ends, place, side="right").astype(jnp.int32)

  def of_row(field: jax.Array) -> jax.Array:
    return field.at[rows].get(mode="fill", fill_value=0)

  live = place < ends[-1]
  offset = jnp.where(live, place - of_row(ends - counts), 0)
  back = jnp.where(live, of_row(plan.num_drafts) - offset, 0)
  fields = jnp.stack([
    jnp.where(live, of_row(plan.row_request), shape.max_requests),
    jnp.where(live, of_row(plan.seq_lens) - back, 0),
    offset,
    of_row(plan.sample_mask),
  ])  # fmt: skip
  return jnp.where(live, of_row(plan.logits_idx) - back, 0), fields


def accept(tokens: jax.Array, drafts: jax.Array, offset: jax.Array, max_drafts: int) -> jax.Array:
  """Which of the drawn tokens are outputs, bool[B].

  Args:
    tokens: i32[B], drawn at each place.
    drafts: i32[B], the draft that the next place has computed; whatever where there is none.
    offset: i32[B], of each place in its row; the places of a row are consecutive.
    max_drafts: static, K.
  """
  agreed = tokens == drafts
  counts = offset == 0
  for _ in range(max_drafts):
    before = jnp.pad(counts & agreed, (1, 0))[:-1]
    counts = (offset == 0) | before
  return counts


def verify(
  leaves: tuple[jax.Array, ...],
  hidden: jax.Array,
  token_table: jax.Array,
  sampling_table: SamplingTable,
  fields: jax.Array,
  *,
  graphdef: nnx.GraphDef,
  places: int,
  rows: int,
  max_drafts: int,
  drafter: ngram.Ngram | None,
) -> tuple[jax.Array, StepOutput]:
  """Draws a token at the first `places` places, accepts drafts, and looks for new ones.

  Args:
    leaves: parameters, from `llama.load`.
    hidden: f32[R (1 + K), Dm], from `forward`.
    token_table: i32[Q, max_model_len], donated; has the drafts at their positions.
    sampling_table: options of all requests.
    fields: i32[4, R (1 + K)], from `forward`.
    graphdef: static, from `llama.load`.
    places: static, B; at least the plan's rows and drafts together.
    rows: static, most rows of the plan among them.
    max_drafts: static, K.
    drafter: static; None: somebody else proposes.

  Returns:
    (token_table with the outputs and the new drafts behind them; what was computed at B places).
  """
  request, position, offset, live = fields[:, :places]
  model = llama.merge(graphdef, leaves)
  logits = dots.linear(hidden[:places], model.head)
  options = sampling.row_options(sampling_table, request, position)
  output = sampling.sample(logits, options, logit_edits.of(sampling_table.edits, token_table))
  drafts = token_table.at[request, position].get(mode="fill", fill_value=0)
  counts = accept(output.tokens, drafts, offset, max_drafts) & (live > 0)
  unused = token_table.shape[0] + jnp.arange(places, dtype=jnp.int32)
  token_table = token_table.at[jnp.where(counts, request, unused), position].set(
    output.tokens, mode="drop", unique_indices=True
  )
  # By row: whose it is, and the position behind its last output.
  row = jnp.cumsum(offset == 0, dtype=jnp.int32) - 1
  owner = jnp.full(rows, token_table.shape[0], jnp.int32)
  owner = owner.at[jnp.where(counts, row, rows)].set(request, mode="drop")
  ends = jnp.zeros(rows, jnp.int32)
  ends = ends.at[row].max(jnp.where(counts, position + 1, 0), mode="drop")
  proposed = jnp.zeros(rows, jnp.int32)
  if drafter is not None:
    token_table, proposed = _propose(token_table, owner, ends, max_drafts, drafter)
  return token_table, dataclasses.replace(
    output, counts=counts, owner=owner, ends=ends, proposed=proposed
  )


def _propose(
  token_table: jax.Array, owner: jax.Array, ends: jax.Array, count: int, how: ngram.Ngram
) -> tuple[jax.Array, jax.Array]:
  """Writes the drafts of every row behind its end; how many they are, i32[rows]."""
  histories = token_table.at[owner].get(mode="fill", fill_value=0)
  tokens, proposed = ngram.propose(histories, ends, count, how)
  lane = jnp.arange(len(owner), dtype=jnp.int32)
  rows = jnp.where(proposed > 0, owner, token_table.shape[0] + lane)
  columns = ends[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
  token_table = token_table.at[rows[:, None], columns].set(tokens, mode="drop", unique_indices=True)
  return token_table, proposed
