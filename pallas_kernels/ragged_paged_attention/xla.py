"""Ragged paged attention in plain XLA: the CPU backend and the fallback everywhere else.

Two loops over the work list, both with dynamic trip counts, so the cost follows the tokens that are
really cached. Decodes, of one query, take all heads in one product per 128 keys (the last 64, where
those are enough) and per group of rows, with the queries laid out block-diagonally. Chunks, of up
to `query_tile` queries, take each KV head alone in tiles of `query_tile` x 512, or of 128 x 512 if
they are short, with an online softmax; tiles that every query sees skip the mask.

On XLA:CPU a product of two bfloat16 matrices with a float32 result is the only one that reaches the
matrix units, transposes folded into it are slow (hence the barriers), and bfloat16 outside of
products is converted through float32; so 16-bit pages are uint16 until a product needs them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

DECODE_GROUP = 8
# In larger steps chunks outweigh decodes, and one row at a time compiles faster.
MOST_GROUPED = 128
# Queries of the tile of a short chunk, which would leave most of a whole one empty.
SHORT_TILE = 128
DECODE_KEYS = 128
CHUNK_KEYS = 512
MASKED = -1e30

LOG2E = math.log2(math.e)

Arrays = tuple[jax.Array, ...]

# (rows, tile, pages of a tile) -> K and V of the tile, as stored: two [*rows.shape, keys, Hkv * D].
Read = Callable[[jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]

_barrier = lax.optimization_barrier


@dataclasses.dataclass(frozen=True)
class _Mask:
  """Which keys a query sees besides the causal rule, and what becomes of scores; all static.

  Every method does nothing, not even to the trace, where its option is None.
  """

  window: int | None
  soft_cap: float | None

  def capped(self, scores: jax.Array) -> jax.Array:
    """Scores in units of log2."""
    if self.soft_cap is None:
      return scores
    cap = self.soft_cap * LOG2E
    return cap * jnp.tanh(scores / cap)

  def inside(self, live: jax.Array, begin: jax.Array, positions: jax.Array) -> jax.Array:
    """`live` [*B, keys] where keys `begin` and following are in the window of `positions` [*B]."""
    if self.window is None:
      return live
    keys = begin + jnp.arange(live.shape[-1]).reshape((1,) * positions.ndim + (-1,))
    return live & (keys > positions[..., None] - self.window)

  def from_tile(self, tile: jax.Array | int, positions: jax.Array, keys: int) -> jax.Array | int:
    """The later of `tile` and the first one, of `keys` keys, that any of `positions` sees."""
    if self.window is None:
      return tile
    return jnp.maximum(tile, jnp.min(jnp.maximum(positions - self.window + 1, 0)) // keys)


def ragged_paged_attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  *,
  block_tables: jax.Array,
  work: jax.Array,
  num_work: jax.Array,
  query_tile: int,
  k_scales: jax.Array | None = None,
  v_scales: jax.Array | None = None,
  decode_items: int | None = None,
  first_page: jax.Array | int = 0,
  window: int | None = None,
  soft_cap: float | None = None,
  decodes: Callable[[], jax.Array] | None = None,
) -> jax.Array:
  """See `api.ragged_paged_attention`.

  A split decode is computed by its first item; the others repeat the work and drop the result, so
  lists for this implementation should have no splits.

  16-bit pages of bfloat16 (or its bits) are multiplied as bfloat16 with float32 sums; float32 and
  float16 pages are multiplied as float32. A tile of int8 pages is made bfloat16 as it is read.

  `decodes` computes them in the place of the loop here: f32[T, Hq * D], zero for all other rows.

  Cost: per item O(keys its last query sees, rounded up to a tile), times `query_tile` for chunks.
  """
  if q.dtype == jnp.float64 or k_pages.dtype == jnp.float64:
    raise NotImplementedError("ragged_paged_attention 'xla' computes in float32; use 'ref'")
  if k_pages.dtype == jnp.bfloat16:
    k_pages, v_pages = (lax.bitcast_convert_type(x, jnp.uint16) for x in (k_pages, v_pages))
  del decode_items
  mask = _Mask(window, soft_cap)
  scaled = q.astype(jnp.float32) * (LOG2E / math.sqrt(q.shape[2]))
  scales = None if k_scales is None or v_scales is None else (k_scales, v_scales)
  read = functools.partial(_read_tile, (k_pages, v_pages), scales, block_tables, first_page)
  out = jnp.zeros((q.shape[0], q.shape[1] * q.shape[2]), jnp.float32)
  size = min(DECODE_GROUP, q.shape[0]) if q.shape[0] <= MOST_GROUPED else 1

  def decode(group: jax.Array, out: jax.Array) -> jax.Array:
    live = group * size + jnp.arange(size) < num_work[0]
    # The others do what the first does, and are dropped.
    items = work[jnp.where(live, group * size + jnp.arange(size), group * size)]
    return _decode_group(scaled, read, items, live, k_pages.shape, mask, out)

  def chunk(i: jax.Array, out: Arrays) -> Arrays:
    def tiled(tile: int) -> Callable[[Arrays], Arrays]:
      return functools.partial(_chunk_item, scaled, read, work[i], k_pages.shape, tile, mask)

    if query_tile <= SHORT_TILE:
      return tiled(query_tile)(out)
    return lax.cond(work[i, 2] <= SHORT_TILE, tiled(SHORT_TILE), tiled(query_tile), out)

  groups = (num_work[0] + size - 1) // size
  out = lax.fori_loop(0, groups, decode, out) if decodes is None else decodes()

  def chunks(out: jax.Array) -> jax.Array:
    by_head = _split_heads(out, k_pages.shape[2], q.shape[2])
    by_head = lax.fori_loop(num_work[0], num_work[1], chunk, by_head)
    return _joined_heads(by_head, q.shape[0])

  out = lax.cond(num_work[1] > num_work[0], chunks, lambda out: out, out)
  return out.reshape(q.shape).astype(q.dtype)


def _split_heads(out: jax.Array, kv_heads: int, dim: int) -> Arrays:
  """[T * G, D] for every KV head with its G query heads, of [T, Hkv * G * D].

  A chunk writes each as it has it; into columns of one array XLA:CPU writes 20 times as slowly.
  """
  return tuple(part.reshape(-1, dim) for part in jnp.split(out, kv_heads, axis=1))


def _joined_heads(by_head: Arrays, tokens: int) -> jax.Array:
  """The inverse of `_split_heads`."""
  return jnp.concatenate([part.reshape(tokens, -1) for part in by_head], axis=1)


def _read_tile(
  pages: tuple[jax.Array, jax.Array],
  scales: tuple[jax.Array, jax.Array] | None,
  block_tables: jax.Array,
  first_page: jax.Array | int,
  rows: jax.Array,
  tile: jax.Array,
  num_pages: int,
) -> tuple[jax.Array, jax.Array]:
  """Pages [tile * num_pages, ...) of `rows`: two [*rows.shape, keys, Hkv * D].

  As stored, but int8 as the bits of bfloat16.
  """
  at = jnp.minimum(tile * num_pages + jnp.arange(num_pages), block_tables.shape[1] - 1)
  ids = block_tables[rows[..., None], at] + first_page

  def gathered(stored: jax.Array) -> jax.Array:
    # Flat pages: each is one run of memory, copied as such.
    flat = stored.reshape(stored.shape[0], -1)
    taken = flat.at[ids.reshape(-1)].get(mode="clip")
    return taken.reshape(*rows.shape, num_pages * stored.shape[1], -1)

  k, v = gathered(pages[0]), gathered(pages[1])
  if scales is None:
    return k, v
  return _widened(k, gathered(scales[0])), _widened(v, gathered(scales[1]))


def _widened(values: jax.Array, scales: jax.Array) -> jax.Array:
  """u16[..., keys, Hkv * D], the bits of bfloat16: values i8 of that shape times f32[..., Hkv]."""
  by_head = values.reshape(*scales.shape, -1).astype(jnp.float32) * scales[..., None]
  bits = lax.bitcast_convert_type(by_head.astype(jnp.bfloat16), jnp.uint16)
  return bits.reshape(values.shape)


def _decode_group(
  q: jax.Array,
  read: Read,
  items: jax.Array,
  live: jax.Array,
  page_shape: tuple[int, ...],
  mask: _Mask,
  out: jax.Array,
) -> jax.Array:
  """Items [G] of one query each, all heads at once; those that are not `live` come last.

  Tiles that all items have are taken together, the rest item by item. The tiles of an item are the
  same either way, so its result does not depend on its neighbours.
  """
  _, page_size, kv_heads, dim = page_shape
  heads, size = q.shape[1], items.shape[0]
  rows, starts, positions, num_live = items[:, 0], items[:, 1], items[:, 3], live.sum()
  own = jnp.arange(heads)[:, None] // (heads // kv_heads) == jnp.arange(kv_heads)[None]
  # Block-diagonal queries: one product with the contiguous page gives every head's scores.
  diagonal = _barrier(jnp.repeat(own, dim, axis=1).astype(q.dtype))
  q_wide = _barrier(jnp.tile(q[starts], (1, 1, kv_heads)) * diagonal[None])

  half = max(1, DECODE_KEYS // page_size // 2)
  halves = positions // (half * page_size) + 1
  # As the last tile of a short context, half a tile is enough; it gives the same bits.
  together = jnp.where(num_live > size // 2, jnp.min(halves // 2), 0)
  done = jnp.max(halves) <= 2 * together + 1
  from_tile = functools.partial(mask.from_tile, keys=2 * half * page_size)

  def step(num_pages: int, who: Arrays, tile: jax.Array, carry: Arrays) -> Arrays:
    rows, q, bound = who
    return _decode_tile(q, read(rows, tile, num_pages), tile, bound, mask, carry)

  carry = (
    jnp.full((size, heads), MASKED),
    jnp.zeros((size, heads)),
    jnp.zeros((size, heads, kv_heads * dim)),
  )
  everyone = rows, q_wide, positions
  whole = functools.partial(step, 2 * half)
  begin = from_tile(0, positions)
  if size == 1:
    carry = lax.fori_loop(begin, (halves[0] + 1) // 2, functools.partial(whole, everyone), carry)
  else:
    carry = lax.fori_loop(begin, together, functools.partial(whole, everyone), carry)
    ends = jnp.where(done, jnp.max(halves), 2 * together)
    start = 2 * from_tile(together, positions)
    carry = lax.fori_loop(start, ends, functools.partial(step, half, everyone), carry)

  def rest(i: jax.Array, carry: Arrays) -> Arrays:
    one = tuple(lax.dynamic_slice_in_dim(x, i, 1) for x in everyone)
    mine = tuple(lax.dynamic_slice_in_dim(x, i, 1) for x in carry)
    tiles = (halves[i] + 1) // 2
    mine = lax.fori_loop(from_tile(together, one[2]), tiles, functools.partial(whole, one), mine)
    return tuple(
      lax.dynamic_update_slice_in_dim(x, y, i, 0) for x, y in zip(carry, mine, strict=True)
    )

  if size > 1:
    carry = lax.fori_loop(0, jnp.where(done, 0, num_live), rest, carry)
  _, total, acc = carry
  acc = acc.reshape(size, heads, kv_heads, dim)
  acc = jnp.where(own[None, :, :, None], acc, 0).sum(2) / total[:, :, None]
  at = jnp.where(live & (items[:, 6] == 0), starts, q.shape[0] + jnp.arange(size))
  return out.at[at].set(acc.reshape(size, -1), mode="drop", unique_indices=True)


def _decode_tile(
  q: jax.Array,
  tile_kv: tuple[jax.Array, jax.Array],
  tile: jax.Array,
  positions: jax.Array,
  mask: _Mask,
  carry: Arrays,
) -> Arrays:
  """One step of the online softmax for [B] queries, each with a tile of its own keys."""
  top, total, acc = carry
  k, v = tile_kv
  keys = k.shape[1]
  begin = tile * keys
  live = begin + jnp.arange(keys)[None] <= positions[:, None]
  live = mask.inside(live, begin, positions)
  v = jnp.where(live[:, :, None], v, jnp.zeros((), v.dtype))
  scores = mask.capped(_batch_dot(_operand(q, k.dtype), _operand(k), 2, 2))
  scores = jnp.where(live[:, None], scores, MASKED)
  new_top = jnp.maximum(top, scores.max(2))
  p = jnp.exp2(scores - new_top[:, :, None])
  keep = jnp.exp2(top - new_top)
  pv = _batch_dot(_operand(p, k.dtype), _operand(v), 2, 1)
  return new_top, total * keep + _ordered_sum(p), acc * keep[:, :, None] + pv


def _chunk_item(
  q: jax.Array,
  read: Read,
  item: jax.Array,
  page_shape: tuple[int, ...],
  query_tile: int,
  mask: _Mask,
  out: Arrays,
) -> Arrays:
  """Up to `query_tile` queries of one row, each KV head with its group of query heads."""
  _, page_size, kv_heads, dim = page_shape
  group = q.shape[1] // kv_heads
  row, start, count, first = (item[i] for i in range(4))
  num_pages = max(1, CHUNK_KEYS // page_size)
  keys = num_pages * page_size
  # The tile is moved left where it would leave q; what it then holds besides the item is dropped.
  at = jnp.minimum(start, q.shape[0] - query_tile)
  positions = first - start + at + jnp.arange(query_tile)
  bound = jnp.repeat(positions, group)
  tile_q = lax.dynamic_slice_in_dim(q, at, query_tile)
  by_head = [
    tile_q[:, h * group : (h + 1) * group].reshape(query_tile * group, dim) for h in range(kv_heads)
  ]

  def step(masked: bool, tile: jax.Array, carry: tuple) -> tuple:
    k, v = read(row, tile, num_pages)
    begin = tile * keys
    key_positions = begin + jnp.arange(keys)
    if masked:
      owned = mask.inside(key_positions < first + count, begin, first)
      v = jnp.where(owned[:, None], v, jnp.zeros((), v.dtype))
    new = []
    for h, (top, total, acc) in enumerate(carry):
      own = slice(h * dim, (h + 1) * dim)
      scores = mask.capped(_dot(_operand(by_head[h], k.dtype), _operand(k[:, own]), 1, 1))
      if masked:
        seen = mask.inside(key_positions[None] <= bound[:, None], begin, bound)
        scores = jnp.where(seen, scores, MASKED)
      new_top = jnp.maximum(top, scores.max(1))
      p = _exp2_operand(scores - new_top[:, None], k.dtype)
      keep = jnp.exp2(top - new_top)
      pv = _dot(p, _operand(v[:, own]), 1, 0)
      new.append((new_top, total * keep + p.astype(jnp.float32).sum(1), acc * keep[:, None] + pv))
    return tuple(new)

  rows = query_tile * group
  zero = jnp.full((rows,), MASKED), jnp.zeros((rows,)), jnp.zeros((rows, dim))
  carry = (zero,) * kv_heads
  carry = _over_tiles(step, carry, first, count, keys, mask)
  live = (bound >= first) & (bound < first + count)
  written = []
  for (_, total, acc), whole in zip(carry, out, strict=True):
    old = lax.dynamic_slice_in_dim(whole, at * group, rows)
    new = jnp.where(live[:, None], acc / total[:, None], old)
    written.append(lax.dynamic_update_slice_in_dim(whole, new, at * group, 0))
  return tuple(written)


def _over_tiles(
  step: Callable, carry: tuple, first: jax.Array, count: jax.Array, keys: int, mask: _Mask
) -> tuple:
  """`step(masked, tile, carry)` over all tiles of `keys` keys that a chunk's queries see."""
  begin = mask.from_tile(0, first, keys)
  if mask.window is None:
    begin = (first + 1) // keys  # all queries see all of the tiles before it
    carry = lax.fori_loop(0, begin, functools.partial(step, False), carry)
  last = (first + count + keys - 1) // keys
  return lax.fori_loop(begin, last, functools.partial(step, True), carry)


def _operand(x: jax.Array, pages: jnp.dtype | None = None) -> jax.Array:
  """`x` as a product wants it: bfloat16 where the pages hold its bits, else float32."""
  if x.dtype == jnp.uint16:
    return lax.bitcast_convert_type(x, jnp.bfloat16)
  return x.astype(jnp.bfloat16 if pages == jnp.uint16 else jnp.float32)


def _dot(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
  """Product with a float32 result, kept apart from the layout changes around it."""
  a, b = _barrier((a, b))
  dims = (((a_dim,), (b_dim,)), ((), ()))
  precision = None if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
  out = lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
  return _barrier(out)


def _batch_dot(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
  """`_dot` for each leading index."""
  if a.shape[0] == 1:
    return _dot(a[0], b[0], a_dim - 1, b_dim - 1)[None]
  a, b = _barrier((a, b))
  dims = (((a_dim,), (b_dim,)), ((0,), (0,)))
  precision = None if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
  out = lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
  return _barrier(out)


def _ordered_sum(x: jax.Array) -> jax.Array:
  """x.sum(-1) in an order that depends neither on leading dimensions nor on a tail of zeros.

  XLA:CPU reduces in windows or not by the size of the whole; sums of halves are what they are.
  """
  while x.shape[-1] % 2 == 0:
    half = x.shape[-1] // 2
    x = x[..., :half] + x[..., half:]
  return x.sum(-1)


def _exp2_operand(x: jax.Array, pages: jnp.dtype) -> jax.Array:
  """2**x for x <= 0, ready for a product.

  For bfloat16 a cubic gives the bits directly: as near as rounding exp2 (relative error 2**-8), at
  half its cost. 2**-126 stands for 0, which vanishes in sums that hold the row's maximum.
  """
  if pages != jnp.uint16:
    return jnp.exp2(x)
  x = jnp.maximum(x, -126.0)
  fraction = x - jnp.floor(x)
  y = (x + 127.0) + fraction * (fraction - 1.0) * (0.30397 + 0.0779 * fraction)
  bits = (y * 128.0 + 0.5).astype(jnp.int32).astype(jnp.uint16)
  return lax.bitcast_convert_type(bits, jnp.bfloat16)
