"""Ragged paged attention in plain XLA: the CPU backend and the fallback everywhere else.

Two loops over the work list, both with dynamic trip counts, so the cost follows the tokens that are
really cached. Decodes, of one query, take all heads in one product per 128 keys, with the
queries laid out block-diagonally. Chunks, of up to `query_tile` queries, take each KV head alone in
tiles of `query_tile` x 512 with an online softmax; tiles that every query sees skip the mask.

On XLA:CPU a product of two bfloat16 matrices with a float32 result is the only one that reaches the
matrix units, transposes folded into it are slow (hence the barriers), and bfloat16 outside of
products is converted through float32; so 16-bit pages are uint16 until a product needs them.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

DECODE_KEYS = 128
CHUNK_KEYS = 512
MASKED = -1e30

# (row, tile, pages of a tile) -> K and V of the tile, as stored: two [keys, Hkv * D].
Read = Callable[[jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]

_barrier = lax.optimization_barrier


def ragged_paged_attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  *,
  block_tables: jax.Array,
  work: jax.Array,
  num_work: jax.Array,
  query_tile: int,
  first_page: jax.Array | int = 0,
) -> jax.Array:
  """See `api.ragged_paged_attention`.

  16-bit pages of bfloat16 (or its bits) are multiplied as bfloat16 with float32 sums; float32 and
  float16 pages are multiplied as float32.

  Cost: per item O(keys its last query sees, rounded up to a tile), times `query_tile` for chunks.
  """
  if q.dtype == jnp.float64 or k_pages.dtype == jnp.float64:
    raise NotImplementedError("ragged_paged_attention 'xla' computes in float32; use 'ref'")
  if k_pages.dtype == jnp.bfloat16:
    k_pages, v_pages = (lax.bitcast_convert_type(x, jnp.uint16) for x in (k_pages, v_pages))
  scaled = q.astype(jnp.float32) * (math.log2(math.e) / math.sqrt(q.shape[2]))
  read = functools.partial(_read_tile, k_pages, v_pages, block_tables, first_page)
  out = jnp.zeros((q.shape[0], q.shape[1] * q.shape[2]), jnp.float32)

  def decode(i: jax.Array, out: jax.Array) -> jax.Array:
    return _decode_item(scaled, read, work[i], k_pages.shape, out)

  def chunk(i: jax.Array, out: jax.Array) -> jax.Array:
    return _chunk_item(scaled, read, work[i], k_pages.shape, query_tile, out)

  out = lax.fori_loop(0, num_work[0], decode, out)
  out = lax.fori_loop(num_work[0], num_work[1], chunk, out)
  return out.reshape(q.shape).astype(q.dtype)


def _read_tile(
  k_pages: jax.Array,
  v_pages: jax.Array,
  block_tables: jax.Array,
  first_page: jax.Array | int,
  row: jax.Array,
  tile: jax.Array,
  num_pages: int,
) -> tuple[jax.Array, jax.Array]:
  """Pages [tile * num_pages, ...) of `row`, as stored: two [num_pages * S, Hkv * D]."""
  at = jnp.minimum(tile * num_pages + jnp.arange(num_pages), block_tables.shape[1] - 1)
  ids = block_tables[row, at] + first_page

  def gathered(pages: jax.Array) -> jax.Array:
    # Flat pages: each is one run of memory, copied as such.
    flat = pages.reshape(pages.shape[0], -1)
    return flat.at[ids].get(mode="clip").reshape(-1, pages.shape[2] * pages.shape[3])

  return gathered(k_pages), gathered(v_pages)


def _decode_item(
  q: jax.Array, read: Read, item: jax.Array, page_shape: tuple[int, ...], out: jax.Array
) -> jax.Array:
  """One query against the keys of its row, all heads at once."""
  _, page_size, kv_heads, dim = page_shape
  heads = q.shape[1]
  row, start, position = item[0], item[1], item[3]
  num_pages = max(1, DECODE_KEYS // page_size)
  keys = num_pages * page_size
  own = jnp.arange(heads)[:, None] // (heads // kv_heads) == jnp.arange(kv_heads)[None]
  own = own[:, :, None]
  # Block-diagonal queries: one product with the contiguous page gives every head's scores.
  q_wide = jnp.where(own, lax.dynamic_index_in_dim(q, start, keepdims=False)[:, None], 0)
  q_wide = q_wide.reshape(heads, kv_heads * dim)

  def step(tile: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    top, total, acc = carry
    k, v = read(row, tile, num_pages)
    live = tile * keys + jnp.arange(keys) <= position
    v = jnp.where(live[:, None], v, jnp.zeros((), v.dtype))
    scores = _dot(_operand(q_wide, k.dtype), _operand(k), 1, 1)
    scores = jnp.where(live[None], scores, MASKED)
    new_top = jnp.maximum(top, scores.max(1))
    p = jnp.exp2(scores - new_top[:, None])
    keep = jnp.exp2(top - new_top)
    pv = _dot(_operand(p, k.dtype), _operand(v), 1, 0)
    return new_top, total * keep + p.sum(1), acc * keep[:, None] + pv

  zero = (
    jnp.full((heads,), MASKED),
    jnp.zeros((heads,)),
    jnp.zeros((heads, kv_heads * dim)),
  )
  _, total, acc = lax.fori_loop(0, position // keys + 1, step, zero)
  acc = jnp.where(own, acc.reshape(heads, kv_heads, dim), 0).sum(1) / total[:, None]
  return lax.dynamic_update_slice_in_dim(out, acc.reshape(1, -1), start, 0)


def _chunk_item(
  q: jax.Array,
  read: Read,
  item: jax.Array,
  page_shape: tuple[int, ...],
  query_tile: int,
  out: jax.Array,
) -> jax.Array:
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
    key_positions = tile * keys + jnp.arange(keys)
    if masked:
      v = jnp.where((key_positions < first + count)[:, None], v, jnp.zeros((), v.dtype))
    new = []
    for h, (top, total, acc) in enumerate(carry):
      own = slice(h * dim, (h + 1) * dim)
      scores = _dot(_operand(by_head[h], k.dtype), _operand(k[:, own]), 1, 1)
      if masked:
        scores = jnp.where(key_positions[None] <= bound[:, None], scores, MASKED)
      new_top = jnp.maximum(top, scores.max(1))
      p = _exp2_operand(scores - new_top[:, None], k.dtype)
      keep = jnp.exp2(top - new_top)
      pv = _dot(p, _operand(v[:, own]), 1, 0)
      new.append((new_top, total * keep + p.astype(jnp.float32).sum(1), acc * keep[:, None] + pv))
    return tuple(new)

  rows = query_tile * group
  zero = jnp.full((rows,), MASKED), jnp.zeros((rows,)), jnp.zeros((rows, dim))
  carry = (zero,) * kv_heads
  seen_by_all = (first + 1) // keys
  carry = lax.fori_loop(0, seen_by_all, functools.partial(step, False), carry)
  last = (first + count + keys - 1) // keys
  carry = lax.fori_loop(seen_by_all, last, functools.partial(step, True), carry)
  live = (positions >= first) & (positions < first + count)
  # Head by head: joining the heads first would cost more than the update itself.
  for h, (_, total, acc) in enumerate(carry):
    corner = at, h * group * dim
    new = (acc / total[:, None]).reshape(query_tile, group * dim)
    old = lax.dynamic_slice(out, corner, new.shape)
    out = lax.dynamic_update_slice(out, jnp.where(live[:, None], new, old), corner)
  return out


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
