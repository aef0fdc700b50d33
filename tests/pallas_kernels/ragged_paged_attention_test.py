"""One suite over implementations and dtypes, against attention written out in float64."""

import copy

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import IMPLEMENTATIONS, ragged_paged_attention
from tests.testing.plans import Row, work_items

TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "uint16": 2e-2}
PAGE_SIZE, NUM_PAGES, PAGES_PER_ROW = 5, 37, 11
# Fixed, so that all batches of a dtype share one executable.
NUM_TOKENS, NUM_ROWS, NUM_ITEMS = 43, 7, 61

# (tokens of the step, tokens before it) of every row.
BATCHES = {
  "one_decode": [(1, 0)],
  "decodes": [(1, 16), (1, 4), (1, 5), (1, 0)],
  "page_boundaries": [(5, 0), (5, 5), (4, 1), (6, 4), (1, 9), (1, 10)],
  "chunks": [(13, 0), (7, 11)],
  "mixed": [(1, 3), (1, 29), (11, 2), (1, 50), (2, 7), (3, 0)],
  "unsorted": [(7, 3), (1, 8), (5, 20)],
}


CALL = jax.jit(ragged_paged_attention, static_argnames=("query_tile", "implementation"))


def _bits(x: np.ndarray, dtype: str) -> np.ndarray:
  if dtype == "uint16":
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)
  return x.astype(dtype)


def _values(x: np.ndarray) -> np.ndarray:
  return (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x).astype(np.float64)


class Case:
  """Random queries and a pool whose every slot that no row has written holds NaN."""

  def __init__(self, batch, dtype, kv_heads, group, *, dim=6, page_size=PAGE_SIZE, pages=NUM_PAGES):
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
    self.pool = _bits(pool, dtype)
    self.q = rng.standard_normal((NUM_TOKENS, kv_heads * group, dim)).astype(np.float32)

  def run(self, implementation, query_tile, first_page=0):
    items, single = work_items(self.rows, query_tile)
    work = np.zeros((NUM_ITEMS, 4), np.int32)
    work[: len(items)] = items
    return np.asarray(
      CALL(
        self.q, self.pool[0], self.pool[1], block_tables=self.table, work=work,
        num_work=np.asarray([single, len(items)], np.int32), query_tile=query_tile,
        implementation=implementation, first_page=np.int32(first_page),
      )
    )  # fmt: skip

  def oracle(self):
    _, heads, dim = self.q.shape
    k_pool, v_pool = _values(self.pool)
    out, at = np.zeros(self.q.shape), 0
    for row in self.rows:
      k, v = (np.concatenate(list(x[row.pages])) for x in (k_pool, v_pool))
      for i in range(row.tokens):
        seen = row.context + i + 1
        for h in range(heads):
          kv = h // (heads // k.shape[1])
          scores = k[:seen, kv] @ self.q[at + i, h].astype(np.float64) / np.sqrt(dim)
          p = np.exp(scores - scores.max())
          out[at + i, h] = p / p.sum() @ v[:seen, kv]
      at += row.tokens
    return out


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("batch", sorted(BATCHES))
def test_ragged_batches_match_the_oracle(batch, dtype, implementation):
  case = Case(BATCHES[batch], dtype, kv_heads=2, group=3)
  out = case.run(implementation, query_tile=7)
  np.testing.assert_allclose(out, case.oracle(), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("kv_heads, group", [(1, 1), (2, 2), (1, 4)])
def test_head_groups_match_the_oracle(kv_heads, group, implementation):
  case = Case(BATCHES["mixed"], "float32", kv_heads, group)
  out = case.run(implementation, query_tile=11)
  np.testing.assert_allclose(out, case.oracle(), atol=TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_contexts_of_several_tiles_match_the_oracle(dtype):
  # 1 decode and 1 chunk past two tiles of 256 and 512 keys, so the loops without a mask run too.
  batch = [(1, 700), (37, 1100), (2, 511), (1, 256)]
  case = Case(batch, dtype, 1, 2, page_size=128, pages=NUM_PAGES)
  out = case.run("xla", query_tile=37)
  np.testing.assert_allclose(out, case.oracle(), atol=TOLERANCE[dtype])


# More rows than a group holds; equal and different numbers of whole and half tiles.
GROUPS = {
  "short": [3, 40, 63, 7, 0, 21, 55, 62, 5],
  "half_at_the_end": [140, 150, 130, 128, 191, 133, 170, 180],
  "one_long": [600, 20, 130, 64, 63, 127, 128, 300, 60],
  "few": [400, 90, 270],
}


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("contexts", sorted(GROUPS))
def test_decodes_match_the_oracle_and_do_not_depend_on_neighbours(contexts, dtype):
  case = Case([(1, n) for n in GROUPS[contexts]], dtype, 3, 2, page_size=64, pages=64)
  together = case.run("xla", 1)
  np.testing.assert_allclose(together, case.oracle(), atol=TOLERANCE[dtype])
  for i, row in enumerate(case.rows):
    alone = copy.copy(case)
    alone.rows, alone.table = [row], case.table[i:].copy()
    alone.table.resize(case.table.shape)
    alone.q = np.roll(case.q, -i, axis=0)
    np.testing.assert_array_equal(alone.run("xla", 1)[0], together[i])


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("query_tile", [1, 19])
def test_result_does_not_depend_on_the_query_tile(query_tile, implementation):
  case = Case(BATCHES["mixed"], "float32", 2, 3)
  np.testing.assert_allclose(case.run(implementation, query_tile), case.oracle(), atol=2e-6)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_first_page_shifts_every_page(implementation):
  case = Case(BATCHES["mixed"], "float32", 2, 3)
  expected = case.run(implementation, 7)
  # The first page that is in use becomes page 0 of the tables.
  shift = min(min(row.pages) for row in case.rows)
  assert shift > 0
  case.table = np.maximum(case.table - shift, 0)
  np.testing.assert_array_equal(case.run(implementation, 7, first_page=shift), expected)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_rows_without_work_are_zero(implementation):
  case = Case(BATCHES["mixed"], "float32", 2, 3)
  assert not case.run(implementation, 7)[case.num_tokens :].any()


def test_ref_computes_in_float64():
  case = Case(BATCHES["mixed"], "float64", 2, 2)
  case.q = case.q.astype(np.float64)
  with jax.enable_x64(True):
    np.testing.assert_allclose(case.run("ref", 5), case.oracle(), atol=1e-14)


def test_unsupported_raises_with_the_reason():
  case = Case(BATCHES["one_decode"], "float32", 1, 1)
  with pytest.raises(NotImplementedError, match="no implementation 'cuda'"):
    case.run("cuda", 1)
  case.pool = np.zeros_like(case.pool, np.int8)
  with pytest.raises(NotImplementedError, match="pages of int8"):
    case.run("xla", 1)


def test_shapes_that_do_not_fit_raise():
  case = Case(BATCHES["one_decode"], "float32", 2, 1)
  case.q = case.q[:, :1]
  with pytest.raises(ValueError, match="does not fit pages"):
    case.run("xla", 1)
  case.q = jnp.zeros((2, 2, 6))
  with pytest.raises(ValueError, match="query_tile=3"):
    case.run("xla", 3)
