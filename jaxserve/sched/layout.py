"""From a decision to the step plan of a bucket: rows, positions, slots, attention work."""

import chex
import jax
import jax.numpy as jnp

from jaxserve.config import PlanShape
from jaxserve.sched import drafts, split_kv
from jaxserve.types import Decision, SchedulerState, StepPlan


def lay_out(state: SchedulerState, decision: Decision, shape: PlanShape) -> StepPlan:
  """Lays a decision out as the fixed-shape plan of a bucket.

  Args:
    state: as returned by `schedule` together with `decision`.
    decision: decision.num_tokens must be at most shape.num_tokens.
    shape: static; its num_tokens is the bucket.

  Returns:
    StepPlan; see its docstring for the padding rules.

  Cost: O(T log R + R M), and O(R log(max_model_len)) where decodes are split.
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
  if state.reuse is not None:
    # A shared page is not written: the one token of it that is computed again has its KV there.
    shared = rows(state.reuse.num_shared).at[token_rows].get(mode="fill", fill_value=0)
    padding = shape.cache.num_slots + jnp.arange(shape.num_tokens, dtype=jnp.int32)
    slots = jnp.where(positions < shared * shape.cache.page_size, padding, slots)
  verified = None if decision.drafts is None else rows(decision.drafts)
  plain = tokens if verified is None else tokens - verified
  is_decode = (plain == 1) & (start >= rows(state.num_prompt))
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
    num_drafts=verified,
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
  tile = shape.query_tile
  tiles = jnp.where(is_decode, 0, -(-tokens // tile))
  item = jnp.arange(shape.num_work_items, dtype=jnp.int32)
  num_decodes, decode_rows, ahead, ranges = _decode_items(item, tokens, is_decode, start, shape)
  tile_ends = num_decodes + jnp.cumsum(tiles, dtype=jnp.int32)
  tile_rows = jnp.searchsorted(tile_ends, item, side="right").astype(jnp.int32)
  in_decode = item < num_decodes
  row = jnp.where(in_decode, decode_rows, tile_rows)

  def of_row(field: jax.Array) -> jax.Array:
    return field.at[row].get(mode="fill", fill_value=0)

  offset = jnp.where(in_decode, 0, item - of_row(tile_ends - tiles)) * tile
  queries = jnp.minimum(of_row(tokens) - offset, tile)
  if ahead is not None:
    offset = jnp.where(in_decode, ahead, offset)
    queries = jnp.where(in_decode, 1, queries)
  position = of_row(start) + offset
  zero = jnp.zeros_like(item)
  taken: tuple[jax.Array, ...] = zero, position + queries, zero, jnp.ones_like(item)
  if ranges is not None:
    taken = tuple(jnp.where(in_decode, mine, one) for mine, one in zip(ranges, taken, strict=True))
  first = of_row(query_start_loc[:-1]) + offset
  columns = jnp.stack([row, first, queries, position, *taken], axis=-1)
  work = jnp.where((item < tile_ends[-1])[:, None], columns, 0)
  return jnp.stack([num_decodes, tile_ends[-1]]), work


def _decode_items(
  item: jax.Array, tokens: jax.Array, is_decode: jax.Array, start: jax.Array, shape: PlanShape
) -> tuple[jax.Array, jax.Array, jax.Array | None, tuple[jax.Array, ...] | None]:
  """How many items decodes have, their rows and offsets, and what they take where they are split.

  Offsets, i32[W], are positions past the row's `start`; None where all are 0, as without drafts.
  What they take is (kv_start, kv_end, split, num_splits), i32[W] each. All are garbage past the
  decodes.
  """
  if not shape.max_drafts:
    return _items_of(item, is_decode, start, shape)
  count, rows, offset = drafts.queries(tokens, is_decode, shape.num_samples)
  live = jnp.arange(shape.num_samples, dtype=jnp.int32) < count
  position = start.at[rows].get(mode="fill", fill_value=0) + offset
  num, query, _, ranges = _items_of(item, live, position, shape)
  row, ahead = (x.at[query].get(mode="fill", fill_value=0) for x in (rows, offset))
  return num, row, ahead, ranges


def _items_of(
  item: jax.Array, is_decode: jax.Array, start: jax.Array, shape: PlanShape
) -> tuple[jax.Array, jax.Array, jax.Array | None, tuple[jax.Array, ...] | None]:
  """The same for queries of which each is a row of its own."""
  lane = jnp.arange(is_decode.shape[0], dtype=jnp.int32)
  if shape.splits is None:
    num_items = item.shape[0]
    place = jnp.cumsum(is_decode, dtype=jnp.int32) - 1
    place = jnp.where(is_decode, place, num_items + lane)
    rows = jnp.zeros(num_items, jnp.int32).at[place].set(lane, mode="drop", unique_indices=True)
    return jnp.sum(is_decode, dtype=jnp.int32), rows, None, None
  keys = jnp.where(is_decode, start + 1, 0)
  chunk = split_kv.chunk_keys(keys, shape.splits, shape.max_model_len)
  counts = split_kv.count_items(keys, chunk)
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  rows = jnp.searchsorted(ends, item, side="right").astype(jnp.int32)

  def of_row(field: jax.Array) -> jax.Array:
    return field.at[rows].get(mode="fill", fill_value=0)

  split = item - of_row(ends - counts)
  kv_end = jnp.minimum((split + 1) * chunk, of_row(keys))
  return ends[-1], rows, None, (split * chunk, kv_end, split, of_row(counts))
