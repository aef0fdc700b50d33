"""Decodes on Hopper: split-KV attention, the heads of a group packed into one tile, and a merge.

Block (item, KV head): one warpgroup streams the item's pages through a ring in shared memory with
the copy engine, the other multiplies. A tile has 64 rows, of which a query's heads fill at most 8,
padded: what bounds a decode is reading K and V once, and 64 rows fit under that roof
(docs of the numbers: experiments/kernel_notes.md). Every item leaves its normalised result and the
log-sum-exp of its rows in float32; the merge adds them up, weighted (Flash-Decoding).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention import mosaic_gpu_stages as stages
from pallas_kernels.ragged_paged_attention.config import ROWS, Attention, Decode

Ref = Any
# Columns of the work list.
ROW, FIRST, COUNT, POSITION, KV_START, KV_END, SPLIT, NUM_SPLITS = range(8)
MERGED_HEADS = 8  # KV heads, or (KV head, query) pairs, of one block of the merge: 8 rows each
_COMPUTE, _MEMORY = 0, 1


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
    split, name="ragged_paged_attention_decode", grid={"item": items, "head": kv_heads},
    warpgroups=2, interpret=interpret,
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
  """One item and KV head: its keys' part of the softmax, to rows of `out` and `weights`."""
  item, head, wg = (lax.axis_index(name) for name in ("item", "head", "wg"))
  dim, ring = attention.head_dim, (decode.stages, decode.keys, attention.head_dim)
  dtype = q.dtype

  def block(
    tiles: Ref, q_s: Ref, v_s: Ref, p_s: Ref | None, weights_s: Ref, q_in: Ref,
    loaded: tuple[Ref, Ref], free: tuple[Ref, Ref],
  ) -> None:  # fmt: skip
    k_s, out_s = tiles
    row, position = work[item, ROW], work[item, POSITION]
    keys = stages.keys_of(
      attention, decode.keys, work[item, KV_START], work[item, KV_END], position
    )

    @pl.when(wg == _MEMORY)
    def _() -> None:
      stages.stream_pages(
        attention, decode.keys, keys, lambda column: block_tables[row, column] + first_page[0],
        head, (k_pool, v_pool), (k_s, v_s), loaded, free,
      )  # fmt: skip

    @pl.when(wg == _COMPUTE)
    def _() -> None:
      first = work[item, FIRST]
      _load_queries(attention, decode, tokens, first, head, q, q_s, q_in)
      sums = _attend_tiles(attention, decode, keys, position, q_s, k_s, v_s, p_s, loaded, free)
      at = (item * attention.kv_heads + head) * decode.rows
      # The ring of K is free by now, and the result needs as much.
      out_s[...] = stages.normalised(sums)
      weights_s[...] = stages.log_sum_exp(sums)
      plgpu.commit_smem()
      mine = pl.ds(at, decode.rows)
      plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, decode.rows)], out.at[mine])
      plgpu.copy_smem_to_gmem(weights_s.at[pl.ds(0, decode.rows)], weights.at[mine])
      plgpu.wait_smem_to_gmem(0)

  copies = decode.keys // min(decode.keys, attention.page_size)

  @pl.when(item < num_work[0])
  def _() -> None:
    pl.run_scoped(
      block,
      plgpu.RefUnion(stages.swizzled(ring, dtype), plgpu.SMEM((ROWS, dim), jnp.float32)),
      stages.swizzled((ROWS, dim), dtype),
      stages.swizzled(ring, dtype),
      stages.swizzled((ROWS, decode.keys), dtype) if attention.interpretable else None,
      plgpu.SMEM((ROWS,), jnp.float32),
      plgpu.Barrier(num_arrivals=decode.queries, num_barriers=1),
      (plgpu.Barrier(num_arrivals=copies, num_barriers=decode.stages),) * 2,
      (plgpu.Barrier(num_barriers=decode.stages),) * 2,
      collective_axes="wg",
    )


def _load_queries(
  attention: Attention, decode: Decode, tokens: int, first: jax.Array, head: jax.Array,
  q: Ref, q_s: Ref, q_in: Ref,
) -> None:  # fmt: skip
  """The item's queries, a group of 8 rows each; rows past them are never used."""
  size = decode.padded_group
  for i in range(decode.queries):
    token = jnp.minimum(first + i, tokens - 1)
    at = (token * attention.kv_heads + head) * size
    plgpu.copy_gmem_to_smem(q.at[pl.ds(at, size)], q_s.at[pl.ds(i * size, size)], q_in.at[0])
  plgpu.barrier_wait(q_in.at[0])


def _attend_tiles(
  attention: Attention, decode: Decode, keys: stages.Keys, position: jax.Array, q_s: Ref,
  k_s: Ref, v_s: Ref, p_s: Ref | None, loaded: tuple[Ref, Ref], free: tuple[Ref, Ref],
) -> stages.Sums:  # fmt: skip
  """The consumer's loop over the item's tiles."""

  def step(tile: jax.Array, sums: stages.Sums, *, edge: bool) -> stages.Sums:
    stage = lax.rem(tile - keys.first_tile, jnp.int32(decode.stages))
    plgpu.barrier_wait(loaded[0].at[stage])
    x = stages.scores(attention, q_s, k_s.at[stage])
    plgpu.barrier_arrive(free[0].at[stage])
    if edge:
      x = stages.masked(attention, x, tile * decode.keys, position, decode.padded_group)
    weights, sums = stages.softmax(x, sums)
    plgpu.barrier_wait(loaded[1].at[stage])
    if edge:

      @pl.when(stages.has_foreign_rows(keys, decode.keys, tile))
      def _() -> None:
        stages.zero_foreign_rows(v_s.at[stage], keys, tile * decode.keys)

    sums = stages.add_values(attention, weights.astype(q_s.dtype), v_s.at[stage], sums, p_s)
    plgpu.barrier_arrive(free[1].at[stage])
    return sums

  return stages.over_tiles(
    attention, decode.keys, keys, keys.end_tile, position, position + (decode.queries - 1), step
  )


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
