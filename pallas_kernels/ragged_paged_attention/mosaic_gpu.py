"""Ragged paged attention in Pallas Mosaic GPU, for Hopper: a decode and a chunk kernel.

Both are launched for every batch and find their items in the work list; a block without work
returns at once. See `mosaic_gpu_decode`, `mosaic_gpu_chunk`, and `mosaic_gpu_stages` for the steps
that they share.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import mosaic_gpu_chunk, mosaic_gpu_decode
from pallas_kernels.ragged_paged_attention.config import Attention, Chunk, Decode

_DECODE, _CHUNK = Decode(), Chunk()


def ragged_paged_attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  *,
  block_tables: jax.Array,
  work: jax.Array,
  num_work: jax.Array,
  query_tile: int,
  decode_items: int,
  first_page: jax.Array | int = 0,
  window: int | None = None,
  soft_cap: float | None = None,
  decode: Decode = _DECODE,
  chunk: Chunk = _CHUNK,
  interpret: Any = None,
) -> jax.Array:
  """See `api.ragged_paged_attention`. Multiplies in the dtype of the pages with float32 sums.

  Args:
    q: [T, Hq, D], rounded to the pages' dtype.
    k_pages: [N, S, Hkv, D], bfloat16 or float16.
    v_pages: like k_pages.
    block_tables: i32[R, M].
    work: i32[W, 8].
    num_work: i32[2].
    query_tile: most queries of an item; at most 128.
    decode_items: most decode items.
    first_page: added to every page id.
    window: sliding window.
    soft_cap: of scores.
    decode: tiling of decodes.
    chunk: tiling of chunks.
    interpret: None on a GPU; else what `compat.interpreter` returns, which selects the forms that
      it can run.

  Returns:
    [T, Hq, D] of q's dtype; rows that no item names are zero.

  Cost: reads K and V of an item once per KV head for decodes, once per query head for chunks (most
  of it from the L2 cache); decodes also write and read 8 * D float32 per split and KV head.
  """
  pages, size, kv_heads, dim = k_pages.shape
  attention = Attention(
    kv_heads=kv_heads, group=q.shape[1] // kv_heads, head_dim=dim, page_size=size, window=window,
    soft_cap=soft_cap, interpretable=interpret is not None,
  )  # fmt: skip
  if query_tile > chunk.queries:
    raise ValueError(f"query_tile={query_tile}: must be at most {chunk.queries}")
  arrays: dict[str, Any] = {
    "work": work,
    "num_work": num_work,
    "block_tables": block_tables,
    "first_page": jnp.asarray(first_page, jnp.int32).reshape(1),
    "q": q.astype(k_pages.dtype),
    "k_pool": k_pages.reshape(pages * size, kv_heads * dim),
    "v_pool": v_pages.reshape(pages * size, kv_heads * dim),
    "interpret": interpret,
  }
  out = jnp.zeros(q.shape, k_pages.dtype)
  out = mosaic_gpu_chunk.attend(attention, chunk, work.shape[0], out=out, **arrays)
  out = mosaic_gpu_decode.attend(attention, decode, decode_items, out=out, **arrays)
  return out.astype(q.dtype)
