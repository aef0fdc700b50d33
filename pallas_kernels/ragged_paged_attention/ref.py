"""The reference: every query against every slot its row could have. Small, slow, plainly right."""

import math

import jax
import jax.numpy as jnp
from jax import lax


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
) -> jax.Array:
  """See `api.ragged_paged_attention`. Computes in float64 if q or the pages are, else in float32.

  Cost: O(T * M * S) time and memory.
  """
  del query_tile, decode_items
  tokens, heads, dim = q.shape
  _, page_size, kv_heads, _ = k_pages.shape
  slots = block_tables.shape[1] * page_size

  # inside[w, t]: item w holds query t. Of a split decode the first item stands for all.
  t = jnp.arange(tokens, dtype=work.dtype)[None]
  row, start, count, first = (work[:, i, None] for i in range(4))
  real = jnp.arange(work.shape[0], dtype=work.dtype)[:, None] < num_work[1]
  real &= work[:, 6, None] == 0
  inside = real & (start <= t) & (t < start + count)
  rows = jnp.sum(jnp.where(inside, row, 0), axis=0, dtype=work.dtype)
  positions = jnp.sum(jnp.where(inside, first + t - start, 0), axis=0, dtype=work.dtype)
  ends = jnp.sum(jnp.where(inside, first + count, 0), axis=0, dtype=work.dtype)

  pages = block_tables[rows] + first_page
  k = _decoded(k_pages, k_scales)[pages].reshape(tokens, slots, kv_heads, dim)
  v = _decoded(v_pages, v_scales)[pages].reshape(tokens, slots, kv_heads, dim)
  wide = jnp.float64 if jnp.float64 in (q.dtype, k.dtype) else jnp.float32
  slot = jnp.arange(slots, dtype=work.dtype)[None]
  written, visible = slot < ends[:, None], slot <= positions[:, None]
  if window is not None:
    written, visible = (x & (slot > positions[:, None] - window) for x in (written, visible))
  k, v = (jnp.where(written[:, :, None, None], x, 0).astype(wide) for x in (k, v))

  grouped = q.astype(wide).reshape(tokens, kv_heads, heads // kv_heads, dim) / math.sqrt(dim)
  scores = jnp.einsum("tkgd,tskd->tkgs", grouped, k, precision="highest")
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
  out = jnp.einsum("tkgs,tskd->tkgd", jax.nn.softmax(scores), v, precision="highest")
  out = jnp.where(inside.any(0)[:, None, None], out.reshape(q.shape), 0)
  return out.astype(q.dtype)


def _decoded(pages: jax.Array, scales: jax.Array | None) -> jax.Array:
  if scales is not None:
    return pages.astype(jnp.float32) * scales[..., None]
  return lax.bitcast_convert_type(pages, jnp.bfloat16) if pages.dtype == jnp.uint16 else pages
