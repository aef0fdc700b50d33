"""Prefill chunks on Hopper, in the shape of FlashAttention-3.

A block takes units (item, query head): one warpgroup streams the row's pages through a ring in
shared memory with the copy engine, two others take 64 queries each. They take turns on the tensor
cores: while one multiplies, the other computes its softmax (FlashAttention-3's ping-pong). Tiles
that all 64 queries see skip the mask, and tiles that none sees are not loaded.
"""

import functools
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
  POSITION,
  ROW,
  ROWS,
  Attention,
  Chunk,
)

Ref = Any
_MEMORY = 2  # warpgroups 0 and 1 compute


class _Shared(NamedTuple):
  """What the warpgroups of a block share, and its types; barriers of K and V by stage."""

  q: Ref
  k: Ref
  v: Ref
  weights: Ref | None
  out: Ref
  loaded: tuple[Ref, Ref]
  free: tuple[Ref, Ref]
  turn: Ref
  clean: Ref


class _Rows(NamedTuple):
  """The queries of one warpgroup: `size` of them from token `first` on, at `position`."""

  first: jax.Array
  size: jax.Array
  position: jax.Array


def attend(
  attention: Attention,
  chunk: Chunk,
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
  """Computes the chunk items [num_work[0], num_work[1]) in place of their rows of `out`.

  Args:
    attention: the operation.
    chunk: tiling.
    items: most chunk items.
    work: i32[W, 8], see `api`; items have at most `chunk.queries` queries.
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
  # A tile is read whole, wherever it begins.
  padded = jnp.pad(q, ((0, chunk.queries), (0, 0), (0, 0)))
  written = jax.new_ref(out.reshape(q.shape[0], -1))

  def body(*refs: Ref) -> None:
    _chunk_kernel(attention, chunk, *refs)

  compat.kernel(
    body, name="ragged_paged_attention_chunk",
    grid={"block": min(items * q.shape[1], chunk.blocks)}, warpgroups=3, interpret=interpret,
  )(work, num_work, block_tables, first_page, padded, k_pool, v_pool, written)  # fmt: skip
  return written[...].reshape(q.shape)


def _chunk_kernel(
  attention: Attention, chunk: Chunk, work: Ref, num_work: Ref, block_tables: Ref,
  first_page: Ref, q: Ref, k_pool: Ref, v_pool: Ref, out: Ref,
) -> None:  # fmt: skip
  """The block's share of items and query heads."""
  wg, heads, dim = lax.axis_index("wg"), jnp.int32(q.shape[1]), attention.head_dim
  units = (num_work[1] - num_work[0]) * heads

  def item_and_head(unit: jax.Array) -> tuple[jax.Array, jax.Array]:
    return num_work[0] + lax.div(unit, heads), lax.rem(unit, heads)

  def keys_of(item: jax.Array, before: jax.Array) -> stages.Keys:
    start, end, position = work[item, KV_START], work[item, KV_END], work[item, POSITION]
    return stages.keys_of(attention, chunk.keys, start, end, position, before)

  def rows_of(item: jax.Array) -> _Rows:
    first, count, position = work[item, FIRST], work[item, COUNT], work[item, POSITION]
    skipped = wg * ROWS
    return _Rows(first + skipped, jnp.clip(count - skipped, 0, ROWS), position + skipped)

  def roles(shared: _Shared) -> None:
    def produce(unit: jax.Array, before: jax.Array) -> stages.Keys:
      item, head = item_and_head(unit)
      row, keys = work[item, ROW], keys_of(item, before)
      stages.stream_pages(
        attention, chunk.keys, keys, lambda column: block_tables[row, column] + first_page[0],
        lax.div(head, jnp.int32(attention.group)), (k_pool, v_pool), (shared.k, shared.v),
        shared.loaded, shared.free,
      )  # fmt: skip
      return keys

    def consume(unit: jax.Array, before: jax.Array) -> stages.Keys:
      item, head = item_and_head(unit)
      shared.q[wg] = compat.load(q.at[pl.ds(rows_of(item).first, ROWS), head], stages.WGMMA)
      plgpu.commit_smem()
      sums = _attend_tiles(attention, chunk, keys_of(item, before), rows_of(item), wg, shared)
      shared.out[wg] = stages.normalised(sums).astype(q.dtype)
      plgpu.commit_smem()
      # Read again: registers are short, memory is not.
      _store_rows(shared.out.at[wg], out, rows_of(item), pl.ds(head * dim, dim))
      return keys_of(item, before)

    @pl.when(wg == _MEMORY)
    def _() -> None:
      plgpu.set_max_registers(24, action="decrease")
      stages.over_units(chunk.blocks, units, produce)

    @pl.when(wg < _MEMORY)
    def _() -> None:
      plgpu.set_max_registers(240, action="increase")
      stages.over_units(chunk.blocks, units, consume)

  @pl.when(lax.axis_index("block") < units)
  def _() -> None:
    scratch = _scratch(attention, chunk, q.dtype)
    pl.run_scoped(lambda *refs: roles(_Shared(*refs)), *scratch, collective_axes="wg")


def _scratch(attention: Attention, chunk: Chunk, dtype: Any) -> _Shared:
  """Shared memory and barriers of a block."""
  dim, ring = attention.head_dim, (chunk.stages, chunk.keys, attention.head_dim)
  copies = chunk.keys // min(chunk.keys, attention.page_size)
  by_form = stages.swizzled((2, ROWS, chunk.keys), dtype) if attention.interpretable else None
  return _Shared(
    q=stages.swizzled((2, ROWS, dim), dtype),
    k=stages.swizzled(ring, dtype),
    v=stages.swizzled(ring, dtype),
    weights=by_form,
    out=plgpu.SMEM((2, ROWS, dim), dtype),
    loaded=(plgpu.Barrier(num_arrivals=copies, num_barriers=chunk.stages),) * 2,
    free=(plgpu.Barrier(num_arrivals=2, num_barriers=chunk.stages),) * 2,
    turn=plgpu.Barrier(num_arrivals=2, num_barriers=1),
    clean=plgpu.Barrier(num_barriers=chunk.stages),
  )


def _attend_tiles(
  attention: Attention, chunk: Chunk, keys: stages.Keys, rows: _Rows, wg: jax.Array,
  shared: _Shared,
) -> stages.Sums:  # fmt: skip
  """A consumer's loops: tiles with a mask at the window's edge, without, with the causal mask."""
  size = jnp.int32(chunk.keys)
  end = lax.div(rows.position + rows.size + (size - 1), size)
  end = jnp.where(rows.size > 0, end, keys.first_tile)

  def stage_of(tile: jax.Array) -> jax.Array:
    return keys.stage(tile, chunk.stages)

  def take_turns() -> None:
    plgpu.barrier_arrive(shared.turn.at[0])
    plgpu.barrier_wait(shared.turn.at[0])

  def await_keys(tile: jax.Array) -> None:
    pl.when(tile < end)(lambda: plgpu.barrier_wait(shared.loaded[0].at[stage_of(tile)]))

  def step(tile: jax.Array, sums: stages.Sums, *, edge: bool) -> stages.Sums:
    stage = stage_of(tile)
    x = stages.scores(attention, shared.q.at[wg], shared.k.at[stage], then=take_turns)
    plgpu.barrier_arrive(shared.free[0].at[stage])
    if edge:
      x = stages.masked(attention, x, tile * chunk.keys, rows.position, 1)
    weights, sums = stages.softmax(x, sums)
    plgpu.barrier_arrive(shared.turn.at[0])
    plgpu.barrier_wait(shared.loaded[1].at[stage])
    if edge:
      _clean_values(chunk, keys, tile, wg, shared)
    plgpu.barrier_wait(shared.turn.at[0])
    scratch = None if shared.weights is None else shared.weights.at[wg]
    v, then = shared.v.at[stage], functools.partial(await_keys, tile + 1)
    sums = stages.add_values(attention, weights.astype(v.dtype), v, sums, scratch, then)
    plgpu.barrier_arrive(shared.free[1].at[stage])
    return sums

  def skip(tile: jax.Array, _: None) -> None:
    # Every phase of a barrier is awaited: a later item relies on the parity.
    stage = stage_of(tile)
    plgpu.barrier_wait(shared.loaded[0].at[stage])
    plgpu.barrier_arrive(shared.free[0].at[stage])
    take_turns()
    plgpu.barrier_arrive(shared.turn.at[0])
    plgpu.barrier_wait(shared.loaded[1].at[stage])
    _clean_values(chunk, keys, tile, wg, shared)
    plgpu.barrier_wait(shared.turn.at[0])
    plgpu.barrier_arrive(shared.free[1].at[stage])

  last_query = rows.position + (ROWS - 1)
  await_keys(keys.first_tile)
  pl.when(wg == 1)(take_turns)
  sums = stages.over_tiles(attention, chunk.keys, keys, end, rows.position, last_query, step)
  lax.fori_loop(end, keys.end_tile, skip, None)
  pl.when(wg == 0)(take_turns)
  return sums


def _clean_values(
  chunk: Chunk, keys: stages.Keys, tile: jax.Array, wg: jax.Array, shared: _Shared
) -> None:
  """Zeroes foreign rows of V, once for both warpgroups: the first does it, the second waits."""
  stage = keys.stage(tile, chunk.stages)
  foreign = stages.has_foreign_rows(keys, chunk.keys, tile)

  @pl.when(jnp.logical_and(foreign, wg == 0))
  def _() -> None:
    stages.zero_foreign_rows(shared.v.at[stage], keys, tile * chunk.keys)
    plgpu.barrier_arrive(shared.clean.at[stage])

  @pl.when(jnp.logical_and(foreign, wg == 1))
  def _() -> None:
    plgpu.barrier_wait(shared.clean.at[stage])


def _store_rows(out_s: Ref, out: Ref, rows: _Rows, columns: Any) -> None:
  """Copies the first rows.size rows to `out`, in pieces of 64, 32, ..., 1: what is behind them is
  the next item's."""
  for size in (64, 32, 16, 8, 4, 2, 1):
    at = lax.div(rows.size, jnp.int32(2 * size)) * (2 * size)

    @pl.when(lax.bitwise_and(rows.size, jnp.int32(size)) != 0)
    def _(at: jax.Array = at, size: int = size) -> None:
      plgpu.copy_smem_to_gmem(
        out_s.at[pl.ds(at, size)], out.at[pl.ds(rows.first + at, size), columns]
      )

  plgpu.wait_smem_to_gmem(0)
