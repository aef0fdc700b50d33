"""A ragged batch over paged KV with NaN wherever nothing was written, and its result in float64."""

import copy

import jax
import ml_dtypes
import numpy as np

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from tests.testing.plans import Row, work_items

# Fixed, so that all batches of a dtype share one executable.
PAGE_SIZE, NUM_PAGES, PAGES_PER_ROW = 5, 37, 11
NUM_TOKENS, NUM_ROWS, NUM_ITEMS = 43, 7, 61

STATIC = ("query_tile", "implementation", "window", "soft_cap")
CALL = jax.jit(ragged_paged_attention, static_argnames=STATIC)


def _bits(x: np.ndarray, dtype: str) -> np.ndarray:
  if dtype == "bfloat16":
    return x.astype(ml_dtypes.bfloat16)
  if dtype == "uint16":
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)
  return x.astype(dtype)


def _in_8_bits(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(i8 like x, f32 scales without the last axis, NaN where x is)."""
  scale = np.abs(x).max(-1) / 127
  return np.nan_to_num(np.round(x / scale[..., None])).astype(np.int8), scale.astype(np.float32)


def _values(x: np.ndarray) -> np.ndarray:
  return (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x).astype(np.float64)


class Case:
  """Random queries and a pool whose every slot that no row has written holds NaN."""

  def __init__(
    self, batch, dtype, kv_heads, group, *, dim=6, page_size=PAGE_SIZE, pages=NUM_PAGES,
    num_tokens=NUM_TOKENS, q_dtype="float32",
  ):  # fmt: skip
    rng, num_rows = np.random.default_rng(7), max(NUM_ROWS, len(batch))
    free = 1 + rng.permutation(pages - 1)
    self.rows, self.table = [], np.zeros((num_rows, PAGES_PER_ROW), np.int32)
    pool = np.full((2, pages, page_size, kv_heads, dim), np.nan)
    for r, (tokens, context) in enumerate(batch):
      count = -(-(tokens + context) // page_size)
      own, free = free[:count], free[count:]
      self.table[r, :count] = own
      for p in range(tokens + context):
        pool[:, own[p // page_size], p % page_size] = rng.standard_normal((2, kv_heads, dim))
      self.rows.append(Row(tokens, context, own))
    self.num_tokens = sum(t for t, _ in batch)
    self.scales = None
    if dtype == "int8":
      self.pool, self.scales = _in_8_bits(pool)
    else:
      self.pool = _bits(pool, dtype)
    self.q = rng.standard_normal((num_tokens, kv_heads * group, dim)).astype(q_dtype)

  def poison_before(self, window):
    """Whatever lies before the window of a row's first query becomes NaN."""
    pool = self.pool if self.scales is None else self.scales
    size, nan = pool.shape[2], _bits(np.array(np.nan), str(pool.dtype))
    for row in self.rows:
      for p in range(row.context - window + 1):
        pool[:, row.pages[p // size], p % size] = nan

  def arguments(self, query_tile, chunk_keys=None, capacity=NUM_ITEMS):
    """Arguments by name; decodes are split into items of `chunk_keys` keys."""
    items, single = work_items(self.rows, query_tile, chunk_keys)
    work = np.zeros((capacity, 8), np.int32)
    work[: len(items)] = items
    scales = {}
    if self.scales is not None:
      scales = {"k_scales": self.scales[0], "v_scales": self.scales[1]}
    return scales | {
      "q": self.q, "k_pages": self.pool[0], "v_pages": self.pool[1], "block_tables": self.table,
      "work": work, "num_work": np.asarray([single, len(items)], np.int32),
      "query_tile": query_tile,
    }  # fmt: skip

  def run(self, implementation, query_tile, first_page=0, chunk_keys=None, **options):
    arguments = self.arguments(query_tile, chunk_keys)
    first_page = np.int32(first_page)
    return np.asarray(
      CALL(**arguments, implementation=implementation, first_page=first_page, **options)
    )

  def alone(self, i, row):
    """The case with row i alone."""
    alone = copy.copy(self)
    alone.rows, alone.table = [row], self.table[i:].copy()
    alone.table.resize(self.table.shape)
    alone.q = np.roll(self.q, -i, axis=0)
    return alone

  def oracle(self, window=None, soft_cap=None):
    _, heads, dim = self.q.shape
    pool = _values(self.pool)
    k_pool, v_pool = pool if self.scales is None else pool * self.scales[..., None]
    out, at = np.zeros(self.q.shape), 0
    for row in self.rows:
      k, v = (np.concatenate(list(x[row.pages])) for x in (k_pool, v_pool))
      for i in range(row.tokens):
        seen = slice(max(row.context + i + 1 - (window or 10**9), 0), row.context + i + 1)
        for h in range(heads):
          kv = h // (heads // k.shape[1])
          scores = k[seen, kv] @ self.q[at + i, h].astype(np.float64) / np.sqrt(dim)
          if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
          p = np.exp(scores - scores.max())
          out[at + i, h] = p / p.sum() @ v[seen, kv]
      at += row.tokens
    return out
