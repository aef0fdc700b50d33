"""Decodes on Hopper: split-KV attention, the heads of a group packed into one tile, and a merge.

A block takes units (item, KV head): one warpgroup streams the item's pages through a ring in shared
memory with the copy engine, the other multiplies. A tile has 64 rows, of which a query's heads fill
at most 8, padded: what bounds a decode is reading K and V once, and 64 rows fit under that (the
numbers are in experiments/kernel_notes.md). Every item leaves its normalised result and the
log-sum-exp of its rows in float32; the merge adds them up, weighted (Flash-Decoding).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention import mosaic_gpu_stages as stages
from pallas_kernels.ragged_paged_attention.config import (
  COUNT,
  FIRST,
  KV_END,
  KV_START,
  NUM_SPLITS,
  POSITION,
  ROW,
  ROWS,
  SPLIT,
  Attention,
  Decode,
)

Ref = Any
MERGED_HEADS = 8  # KV heads, or (KV head, query) pairs, of one block of the merge: 8 rows each
_COMPUTE, _MEMORY = 0, 1


class _Shared(NamedTuple):
  """What the warpgroups of a block share, and its types; barriers of K and V by stage."""

  queries_or_out: Ref  # the result is written when the queries are done with
  k: Ref
  v: Ref
  weights: Ref | None
  out_weights: Ref
  arrived: Ref
  loaded: tuple[Ref, Ref]
  free: tuple[Ref, Ref]


def attend(
  attention: Attention,
  decode: Decode,
  items: int,
  *,
  work: jax.Array,
  num_work: jax.Array,
  block_tables: jax.Array,
  first_page: jax.Array,
  q: jax.Array,
  k_pool: jax.Array,
  v_pool: jax.Array,
  out: jax.Array,
  interpret: Any = None,
) -> jax.Array:
  """Computes the decode items [0, num_work[0]) in place of their rows of `out`.

  Args:
    attention: the operation.
    decode: tiling.
    items: most decode items.
    work: i32[W, 8], see `api`; decode items have at most `decode.queries` queries.
    num_work: i32[2].
    block_tables: i32[R, M].
    first_page: i32[1].
    q: [T, Hq, D].
    k_pool: [N * S, Hkv * D].
    v_pool: like k_pool.
    out: [T, Hq, D], overwritten if it is not used again.
    interpret: see `compat.kernel`.

  Returns:
    [T, Hq, D], `out` with the rows of the items.
  """
  padding = (0, 0), (0, 0), (0, decode.padded_group - attention.group), (0, 0)
  tokens, dim, kv_heads = q.shape[0], attention.head_dim, attention.kv_heads
  packed = jnp.pad(q.reshape(tokens, kv_heads, attention.group, dim), padding).reshape(-1, dim)
  # The merge reads whole tiles of rows, so the last ones need something behind them.
  rows = items * kv_heads * decode.rows + ROWS
  values = jax.new_ref(jax.lax.empty((rows, dim), jnp.float32))
  weights = jax.new_ref(jax.lax.empty((rows,), jnp.float32))
  merged = jax.new_ref(out.reshape(-1, dim))

  def split(*refs: Ref) -> None:
    _split_kernel(attention, decode, tokens, *refs)

  def merge(*refs: Ref) -> None:
    _merge_kernel(attention, decode, *refs)

  compat.kernel(
    split, name="ragged_paged_attention_decode",
    grid={"block": min(items * kv_heads, decode.blocks)}, warpgroups=2, interpret=interpret,
  )(work, num_work, block_tables, first_page, packed, k_pool, v_pool, values, weights)  # fmt: skip
  blocks = -(-kv_heads * decode.queries // MERGED_HEADS)
  compat.kernel(
    merge, name="ragged_paged_attention_merge", grid={"item": items, "block": blocks},
    warpgroups=1, interpret=interpret,
  )(work, num_work, values, weights, merged)  # fmt: skip
  return merged[...].reshape(q.shape)


def _split_kernel(
  attention: Attention, decode: Decode, tokens: int, work: Ref, num_work: Ref, block_tables: Ref,
  first_page: Ref, q: Ref, k_pool: Ref, v_pool: Ref, out: Ref, weights: Ref,
) -> None:  # fmt: skip
  """The block's share of items and KV heads: their keys' part of the softmax, to rows of `out`."""
  wg, units = lax.axis_index("wg"), num_work[0] * attention.kv_heads

  def keys_of(item: jax.Array, before: jax.Array) -> stages.Keys:
    start, end, position = work[item, KV_START], work[item, KV_END], work[item, POSITION]
    return stages.keys_of(attention, decode.keys, start, end, position, before)

  def roles(shared: _Shared) -> None:
    def produce(unit: jax.Array, before: jax.Array) -> stages.Keys:
      item, head = _item_and_head(attention, unit)
      row, keys = work[item, ROW], keys_of(item, before)
      stages.stream_pages(
        attention, decode.keys, keys, lambda column: block_tables[row, column] + first_page[0],
        head, (k_pool, v_pool), (shared.k, shared.v), shared.loaded, shared.free,
      )  # fmt: skip
      return keys

    def consume(unit: jax.Array, before: jax.Array) -> stages.Keys:
      item, head = _item_and_head(attention, unit)
      keys = keys_of(item, before)
      q_s, out_s = shared.queries_or_out
      _load_queries(attention, decode, tokens, work[item, FIRST], head, q, q_s, shared.arrived)
      sums = _attend_tiles(attention, decode, keys, work[item, POSITION], q_s, shared)
      out_s[...] = stages.normalised(sums)
      shared.out_weights[...] = stages.log_sum_exp(sums)
      plgpu.commit_smem()
      source, mine = pl.ds(0, decode.rows), pl.ds(unit * decode.rows, decode.rows)
      plgpu.copy_smem_to_gmem(out_s.at[source], out.at[mine])
      plgpu.copy_smem_to_gmem(shared.out_weights.at[source], weights.at[mine])
      plgpu.wait_smem_to_gmem(0)
      return keys

    pl.when(wg == _MEMORY)(lambda: stages.over_units(decode.blocks, units, produce))
    pl.when(wg == _COMPUTE)(lambda: stages.over_units(decode.blocks, units, consume))

  @pl.when(lax.axis_index("block") < units)
  def _() -> None:
    scratch = _scratch(attention, decode, q.dtype)
    pl.run_scoped(lambda *refs: roles(_Shared(*refs)), *scratch, collective_axes="wg")


def _scratch(attention: Attention, decode: Decode, dtype: Any) -> _Shared:
  """Shared memory and barriers of a block."""
  dim, ring = attention.head_dim, (decode.stages, decode.keys, attention.head_dim)
  copies = decode.keys // min(decode.keys, attention.page_size)
  by_form = stages.swizzled((ROWS, decode.keys), dtype) if attention.interpretable else None
  queries, out = stages.swizzled((ROWS, dim), dtype), plgpu.SMEM((ROWS, dim), jnp.float32)
  return _Shared(
    queries_or_out=plgpu.RefUnion(queries, out),
    k=stages.swizzled(ring, dtype),
    v=stages.swizzled(ring, dtype),
    weights=by_form,
    out_weights=plgpu.SMEM((ROWS,), jnp.float32),
    arrived=plgpu.Barrier(num_arrivals=decode.queries, num_barriers=1),
    loaded=(plgpu.Barrier(num_arrivals=copies, num_barriers=decode.stages),) * 2,
    free=(plgpu.Barrier(num_barriers=decode.stages),) * 2,
  )


def _item_and_head(attention: Attention, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
  heads = jnp.int32(attention.kv_heads)
  return lax.div(unit, heads), lax.rem(unit, heads)


def _load_queries(
  attention: Attention, decode: Decode, tokens: int, first: jax.Array, head: jax.Array,
  q: Ref, q_s: Ref, arrived: Ref,
) -> None:  # fmt: skip
  """The item's queries, a group of 8 rows each; rows past them are never used."""
  size = decode.padded_group
  for i in range(decode.queries):
    token = jnp.minimum(first + i, tokens - 1)
    at = (token * attention.kv_heads + head) * size
    plgpu.copy_gmem_to_smem(q.at[pl.ds(at, size)], q_s.at[pl.ds(i * size, size)], arrived.at[0])
  plgpu.barrier_wait(arrived.at[0])


def _attend_tiles(
  attention: Attention, decode: Decode, keys: stages.Keys, position: jax.Array, q_s: Ref,
  shared: _Shared,
) -> stages.Sums:  # fmt: skip
  """The consumer's loop over the item's tiles."""

  def step(tile: jax.Array, sums: stages.Sums, *, edge: bool) -> stages.Sums:
    stage = keys.stage(tile, decode.stages)
    plgpu.barrier_wait(shared.loaded[0].at[stage])
    x = stages.scores(attention, q_s, shared.k.at[stage])
    plgpu.barrier_arrive(shared.free[0].at[stage])
    if edge:
      x = stages.masked(attention, x, tile * decode.keys, position, decode.padded_group)
    weights, sums = stages.softmax(x, sums)
    plgpu.barrier_wait(shared.loaded[1].at[stage])
    v = shared.v.at[stage]
    if edge:

      @pl.when(stages.has_foreign_rows(keys, decode.keys, tile))
      def _() -> None:
        stages.zero_foreign_rows(v, keys, tile * decode.keys)

    sums = stages.add_values(attention, weights.astype(v.dtype), v, sums, shared.weights)
    plgpu.barrier_arrive(shared.free[1].at[stage])
    return sums

  last_query = position + (decode.queries - 1)
  return stages.over_tiles(attention, decode.keys, keys, keys.end_tile, position, last_query, step)


def _merge_kernel(
  attention: Attention, decode: Decode, work: Ref, num_work: Ref, values: Ref, weights: Ref,
  out: Ref,
) -> None:  # fmt: skip
  """Block (item, 8 KV heads): if the item is the first of its row, adds up all of the row's."""
  item, block = lax.axis_index("item"), lax.axis_index("block")
  dim, per_item = attention.head_dim, attention.kv_heads * decode.rows

  def merged() -> jax.Array:
    def step(split: jax.Array, sums: stages.Sums) -> stages.Sums:
      rows = pl.ds((item + split) * per_item + block * ROWS, ROWS)
      top = compat.load(weights.at[rows], stages.PER_ROW)
      part = compat.load(values.at[rows], stages.WGMMA)
      new_top = jnp.maximum(sums.top, top)
      keep, add = jnp.exp2(sums.top - new_top), jnp.exp2(top - new_top)
      wide = lambda x: lax.broadcast_in_dim(x, (ROWS, dim), [0])
      return stages.Sums(
        sums.values * wide(keep) + part * wide(add), new_top, sums.total * keep + add
      )

    sums = lax.fori_loop(jnp.int32(0), work[item, NUM_SPLITS], step, stages.no_sums(dim))
    return stages.normalised(sums)

  def store(out_s: Ref) -> None:
    out_s[...] = merged().astype(out.dtype)
    plgpu.commit_smem()
    for i in range(ROWS // decode.padded_group):
      pair = block * (ROWS // decode.padded_group) + i
      head = lax.div(pair, jnp.int32(decode.queries))
      query = lax.rem(pair, jnp.int32(decode.queries))
      real = jnp.logical_and(head < attention.kv_heads, query < work[item, COUNT])
      at = ((work[item, FIRST] + query) * attention.kv_heads + head) * attention.group

      @pl.when(real)
      def _(i: int = i, at: jax.Array = at) -> None:
        plgpu.copy_smem_to_gmem(
          out_s.at[pl.ds(i * decode.padded_group, attention.group)],
          out.at[pl.ds(at, attention.group)],
        )

    plgpu.wait_smem_to_gmem(0)

  @pl.when(jnp.logical_and(item < num_work[0], work[item, SPLIT] == 0))
  def _() -> None:
    pl.run_scoped(store, plgpu.SMEM((ROWS, dim), out.dtype), collective_axes="wg")
