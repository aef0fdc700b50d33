"""The steps that the decode and the chunk kernel share: page loads, scores, softmax, values.

Registers are in the layout of wgmma accumulators throughout. Scores are in units of log2, so that
the exponential is one instruction (FlashAttention-2). The softmax is online: `Sums` holds what is
known after some keys, and a masked score is -inf while the running maximum starts at a finite
number, so a row that has seen no key yet stays at zero instead of NaN.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.config import ROWS, Attention

LOG2E = math.log2(math.e)
LOWEST = -1e30
WGMMA = plgpu.Layout.WGMMA
PER_ROW = WGMMA.reduce(1)

Ref = Any  # a ref to global or shared memory, or to barriers


class Sums(NamedTuple):
  """The online softmax so far: weighted values f32[ROWS, D]; maxima and sums f32[ROWS]."""

  values: jax.Array
  top: jax.Array
  total: jax.Array


class Keys(NamedTuple):
  """The keys of an item: tiles [first_tile, end_tile) hold positions [low, high).

  `before` tiles went through the block's rings for its earlier items.
  """

  low: jax.Array
  high: jax.Array
  first_tile: jax.Array
  end_tile: jax.Array
  before: jax.Array

  @property
  def tiles(self) -> jax.Array:
    """How many there are."""
    return jnp.maximum(self.end_tile - self.first_tile, 0)

  def stage(self, tile: jax.Array, stages: int) -> jax.Array:
    """Which buffer of a ring holds a tile."""
    return lax.rem(self.before + tile - self.first_tile, jnp.int32(stages))


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
  """Shared memory in the layout that wgmma reads: tiles of 8 rows of 128 bytes."""
  transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def over_units(blocks: int, units: jax.Array, run: Callable[[jax.Array, jax.Array], Keys]) -> None:
  """Runs this block's share of the units (item, head): every `blocks`-th, from its own number on.

  A grid of one block for every possible unit would mostly be blocks without work, and they are not
  free: each waits until the shared memory of the one before it is given back.

  Args:
    blocks: of the grid, along the axis "block".
    units: i32[], how many there are.
    run: (unit, tiles that went through the rings before) -> the keys of the unit.
  """
  block = lax.axis_index("block")
  mine = lax.div(units - block + (blocks - 1), jnp.int32(blocks))
  step = lambda i, before: before + run(block + i * blocks, before).tiles
  lax.fori_loop(jnp.int32(0), mine, step, jnp.int32(0))


def keys_of(
  attention: Attention, tile: int, start: Any, end: Any, first_query: Any, before: Any
) -> Keys:
  """The keys in [start, end) that some query at or after `first_query` may see; see `Keys`."""
  low = start
  if attention.window is not None:
    low = jnp.maximum(low, first_query - (attention.window - 1))
  first_tile, end_tile = lax.div(low, jnp.int32(tile)), lax.div(end + (tile - 1), jnp.int32(tile))
  return Keys(low, end, first_tile, end_tile, before)


def no_sums(head_dim: int) -> Sums:
  """Before the first key."""
  return Sums(
    plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), WGMMA),
    plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), PER_ROW),
    plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW),
  )


def stream_pages(
  attention: Attention,
  tile: int,
  keys: Keys,
  page_of: Callable[[jax.Array], jax.Array],
  head: jax.Array,
  pools: tuple[Ref, Ref],
  rings: tuple[Ref, Ref],
  loaded: tuple[Ref, Ref],
  free: tuple[Ref, Ref],
) -> None:
  """The producer: copies the tiles of K and V, page by page, into two rings of buffers.

  Args:
    attention: of the operation.
    tile: keys of a tile.
    keys: of the item.
    page_of: column of the block table -> page.
    head: KV head.
    pools: K and V in global memory, [N * S, Hkv * D].
    rings: [stages, tile, D] in shared memory.
    loaded: barriers by stage, with one arrival for each copy of a tile.
    free: barriers by stage, on which the consumers arrive.
  """
  size, dim = attention.page_size, attention.head_dim
  box = min(size, tile)
  stages = rings[0].shape[0]
  # Columns of the block table that hold the item's keys. Elsewhere in its tiles one of these pages
  # comes again: those keys are masked and their values zeroed.
  first_column, last_column = (
    lax.div(keys.low, jnp.int32(size)),
    lax.div(keys.high - 1, jnp.int32(size)),
  )

  @pl.loop(jnp.int32(0), keys.tiles)
  def _(i: jax.Array) -> None:
    stage = keys.stage(keys.first_tile + i, stages)
    for pool, ring, arrived, released in zip(pools, rings, loaded, free, strict=True):

      @pl.when(keys.before + i >= stages)
      def _(released: Ref = released) -> None:
        plgpu.barrier_wait(released.at[stage])

      for part in range(tile // box):
        at = (keys.first_tile + i) * tile + part * box
        page = page_of(jnp.clip(lax.div(at, jnp.int32(size)), first_column, last_column))
        row = page * size + lax.rem(at, jnp.int32(size))
        plgpu.copy_gmem_to_smem(
          pool.at[pl.ds(row, box), pl.ds(head * dim, dim)],
          ring.at[stage, pl.ds(part * box, box)],
          arrived.at[stage],
        )


def scores(
  attention: Attention, q: Ref, k: Ref, then: Callable[[], None] = lambda: None
) -> jax.Array:
  """f32[ROWS, keys] = q k^T, scaled and capped, in units of log2; `then` while it is computed."""

  def product(accumulator: Ref) -> jax.Array:
    plgpu.wgmma(accumulator, q, k.transpose((1, 0)))
    then()
    return accumulator[...]

  x = pl.run_scoped(product, plgpu.ACC((ROWS, k.shape[0]), jnp.float32))
  scale = 1 / math.sqrt(attention.head_dim)
  if attention.soft_cap is None:
    return x * (scale * LOG2E)
  return jnp.tanh(x * (scale / attention.soft_cap)) * (attention.soft_cap * LOG2E)


def masked(
  attention: Attention, x: jax.Array, first_key: Any, first_query: Any, rows_per_query: int
) -> jax.Array:
  """Scores with -inf where the query of a row does not see the key of a column."""
  row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=WGMMA)
  key = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=WGMMA) + first_key
  if rows_per_query > 1:
    row = lax.shift_right_logical(row, jnp.int32(rows_per_query.bit_length() - 1))
  query = row + first_query
  visible = key <= query
  if attention.window is not None:
    visible = jnp.logical_and(visible, key > query - attention.window)
  return jnp.where(visible, x, -jnp.inf)


def softmax(x: jax.Array, sums: Sums) -> tuple[jax.Array, Sums]:
  """(Weights of new keys relative to the new maximum; the sums rescaled to it, total updated)."""
  top = jnp.maximum(sums.top, x.max(axis=1))
  rescale = jnp.exp2(sums.top - top)
  weights = jnp.exp2(x - lax.broadcast_in_dim(top, x.shape, [0]))
  values = sums.values * lax.broadcast_in_dim(rescale, sums.values.shape, [0])
  return weights, Sums(values, top, sums.total * rescale + weights.sum(axis=1))


def add_values(
  attention: Attention,
  weights: jax.Array,
  v: Ref,
  sums: Sums,
  scratch: Ref | None,
  then: Callable[[], None] = lambda: None,
) -> Sums:
  """Adds weights @ v to the sums; `then` while it is computed.

  Args:
    attention: its `interpretable` chooses the form.
    weights: [ROWS, keys], of v's dtype.
    v: [keys, D] in shared memory.
    sums: whose values grow.
    scratch: [ROWS, keys] in shared memory, for the interpretable form.
    then: called once the product is issued.
  """
  if not attention.interpretable:

    def in_place(accumulator: Ref) -> None:
      plgpu.wgmma(accumulator, weights, v)
      then()

    return sums._replace(values=pl.run_state(in_place)(plgpu.ACC.init(sums.values)))
  assert scratch is not None
  scratch[...] = weights
  plgpu.commit_smem()

  def product(accumulator: Ref) -> jax.Array:
    plgpu.wgmma(accumulator, scratch, v)
    then()
    return accumulator[...]

  values = pl.run_scoped(product, plgpu.ACC((ROWS, attention.head_dim), jnp.float32))
  return sums._replace(values=sums.values + values)


def over_tiles(
  attention: Attention,
  tile: int,
  keys: Keys,
  end_tile: jax.Array,
  first_query: jax.Array,
  last_query: jax.Array,
  step: Callable[..., Sums],
) -> Sums:
  """`step(tile, sums, edge=...)` over tiles up to `end_tile`; edge tiles need a mask.

  Args:
    attention: of the operation.
    tile: keys of a tile.
    keys: of the item.
    end_tile: of these queries, at most that of the item.
    first_query: position; a tile that ends at or before it is visible to all queries.
    last_query: position; a tile that begins inside its window is inside everyone's.
    step: one step of the online softmax.
  """
  edge, inner = functools.partial(step, edge=True), functools.partial(step, edge=False)
  full = jnp.clip(lax.div(first_query + 1, jnp.int32(tile)), keys.first_tile, end_tile)
  sums, begin = no_sums(attention.head_dim), keys.first_tile
  if attention.window is not None:
    inside = jnp.maximum(last_query - (attention.window - 1), 0)
    begin = jnp.clip(lax.div(inside + (tile - 1), jnp.int32(tile)), keys.first_tile, full)
    sums = lax.fori_loop(keys.first_tile, begin, edge, sums)
  sums = lax.fori_loop(begin, full, inner, sums)
  return lax.fori_loop(full, end_tile, edge, sums)


def has_foreign_rows(keys: Keys, tile_keys: int, tile: jax.Array) -> jax.Array:
  """bool[]: tile `tile` holds slots outside [keys.low, keys.high)."""
  first = tile * tile_keys
  return jnp.logical_or(first < keys.low, first + tile_keys > keys.high)


def zero_foreign_rows(v: Ref, keys: Keys, first_key: jax.Array) -> None:
  """Zeroes the rows of a tile of V that are not the item's keys: 0 * NaN would be NaN.

  v: [keys, D] in shared memory; `first_key` is the position of its first row.
  """
  count, dim = v.shape
  for at in range(0, count, ROWS):
    for column in range(0, dim, 64):
      part = v.at[pl.ds(at, ROWS), pl.ds(column, 64)]
      values = plgpu.layout_cast(part[...], WGMMA)
      row = plgpu.broadcasted_iota(jnp.int32, (ROWS, 64), 0, layout=WGMMA) + (first_key + at)
      mine = jnp.logical_and(row >= keys.low, row < keys.high)
      part[...] = jnp.where(mine, values, jnp.zeros_like(values))
  plgpu.commit_smem()


def normalised(sums: Sums) -> jax.Array:
  """f32[ROWS, D], the softmax-weighted mean of the values; zero for rows that saw no key."""
  total = jnp.where(sums.total == 0, jnp.ones_like(sums.total), sums.total)
  return sums.values / lax.broadcast_in_dim(total, sums.values.shape, [0])


def log_sum_exp(sums: Sums) -> jax.Array:
  """f32[ROWS], log2 of the sum of the exponentials; `LOWEST` for rows that saw no key."""
  total = jnp.where(sums.total == 0, jnp.ones_like(sums.total), sums.total)
  return sums.top + jnp.log(total) * LOG2E
