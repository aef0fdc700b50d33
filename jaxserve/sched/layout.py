"""From a decision to the step plan of a bucket: rows, positions, slots, attention work."""

import chex
import jax
import jax.numpy as jnp

from jaxserve.config import PlanShape
from jaxserve.types import Decision, SchedulerState, StepPlan


def lay_out(state: SchedulerState, decision: Decision, shape: PlanShape) -> StepPlan:
  """Lays a decision out as the fixed-shape plan of a bucket.

  Args:
    state: as returned by `schedule` together with `decision`.
    decision: decision.num_tokens must be at most shape.num_tokens.
    shape: static; its num_tokens is the bucket.

  Returns:
    StepPlan; see its docstring for the padding rules.

  Cost: O(T log R + R M).
  """
  num_rows = shape.num_rows
  chex.assert_shape(decision.order, (num_rows,))
  chex.assert_shape(state.block_tables, (shape.max_requests, shape.pages_per_request))
  request = decision.order
  lane = jnp.arange(num_rows, dtype=jnp.int32)
  live = lane < decision.num_scheduled

  def rows(field: jax.Array) -> jax.Array:
    return field.at[request].get(mode="fill", fill_value=0)

  tokens, start = rows(decision.tokens), rows(decision.start)
  seq_lens = jnp.where(live, start + tokens, 0)
  query_start_loc = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tokens, dtype=jnp.int32)])
  pages = -(-seq_lens // shape.cache.page_size)
  column = jnp.arange(shape.pages_per_request, dtype=jnp.int32)
  tables = jnp.where(column[None, :] < pages[:, None], rows(state.block_tables), 0)
  token_rows, positions, slots = _tokens(decision, query_start_loc, start, tables, shape)
  is_decode = (tokens == 1) & (start >= rows(state.num_prompt))
  num_work, work = _work_items(tokens, start, is_decode, query_start_loc, shape)
  return StepPlan(
    num_tokens=decision.num_tokens,
    num_rows=decision.num_scheduled,
    row_request=request,
    query_start_loc=query_start_loc,
    seq_lens=seq_lens,
    logits_idx=jnp.where(live, query_start_loc[1:] - 1, 0),
    sample_mask=rows(decision.samples).astype(jnp.int32),
    block_tables=tables,
    token_rows=token_rows,
    positions=positions,
    slot_mapping=slots,
    num_work=num_work,
    work=work,
  )


def _tokens(
  decision: Decision, query_start_loc: jax.Array, start: jax.Array, tables: jax.Array,
  shape: PlanShape,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
  """Row, position and KV slot of every token, i32[T] each."""
  page_size = shape.cache.page_size
  token = jnp.arange(shape.num_tokens, dtype=jnp.int32)
  valid = token < decision.num_tokens
  row = jnp.searchsorted(query_start_loc[1:], token, side="right").astype(jnp.int32)
  row = jnp.where(valid, row, shape.num_rows)
  base = (start - query_start_loc[:-1]).at[row].get(mode="fill", fill_value=0)
  position = jnp.where(valid, token + base, 0)
  page = tables.at[row, position // page_size].get(mode="fill", fill_value=0)
  slot = page * page_size + position % page_size
  return row, position, jnp.where(valid, slot, shape.cache.num_slots + token)


def _work_items(
  tokens: jax.Array, start: jax.Array, is_decode: jax.Array, query_start_loc: jax.Array,
  shape: PlanShape,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """The attention work list: decodes first, then the tiles of the chunks."""
  tile, capacity = shape.query_tile, shape.num_work_items
  tiles = jnp.where(is_decode, 0, -(-tokens // tile))
  num_decodes = jnp.sum(is_decode, dtype=jnp.int32)
  tile_ends = num_decodes + jnp.cumsum(tiles, dtype=jnp.int32)
  lane = jnp.arange(tokens.shape[0], dtype=jnp.int32)
  item = jnp.arange(capacity, dtype=jnp.int32)

  place = jnp.where(is_decode, jnp.cumsum(is_decode, dtype=jnp.int32) - 1, capacity + lane)
  decode_rows = jnp.zeros(capacity, jnp.int32)
  decode_rows = decode_rows.at[place].set(lane, mode="drop", unique_indices=True)
  tile_rows = jnp.searchsorted(tile_ends, item, side="right").astype(jnp.int32)
  row = jnp.where(item < num_decodes, decode_rows, tile_rows)

  def of_row(field: jax.Array) -> jax.Array:
    return field.at[row].get(mode="fill", fill_value=0)

  index = jnp.where(item < num_decodes, 0, item - of_row(tile_ends - tiles))
  offset = index * tile
  columns = jnp.stack(
    [row, of_row(query_start_loc[:-1]) + offset,
     jnp.minimum(of_row(tokens) - offset, tile), of_row(start) + offset], axis=-1
  )  # fmt: skip
  work = jnp.where((item < tile_ends[-1])[:, None], columns, 0)
  return jnp.stack([num_decodes, tile_ends[-1]]), work
