"""The Mosaic GPU kernels in the interpreter, with its race detector, against float64.

Every slot that no row has written is NaN, in pages of its own and behind the last token of a page.
What the interpreter cannot run is in README.md's list of what has only been compiled.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_gpu_decode
from pallas_kernels.ragged_paged_attention.config import BLOCKS, Attention, Chunk, Decode
from tests.testing.attention import Case

pytestmark = pytest.mark.skipif(
  not compat.HAS_INTERPRETER,
  reason="needs the interpreter of Mosaic GPU kernels: jax 0.11 or newer",
)
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}

# (tokens, context) of the rows; KV heads, group, head dim, page size, dtype; keys of a split.
CASES = {
  "smallest": ([(1, 130), (3, 30), (2, 0)], 1, 1, 64, 64, "bfloat16", 128),
  "splits": ([(1, 0), (1, 127), (1, 128), (1, 300)], 2, 4, 64, 64, "bfloat16", 128),
  "one_head_a_group": ([(1, 90), (5, 3)], 2, 1, 64, 64, "bfloat16", 128),
  "group_of_2": ([(1, 140), (9, 70)], 1, 2, 64, 128, "bfloat16", 128),
  "group_of_3": ([(1, 90), (5, 30)], 3, 3, 64, 64, "bfloat16", 128),
  "group_of_7": ([(1, 60), (3, 130)], 1, 7, 64, 32, "float16", 128),
  "group_of_8": ([(1, 60), (3, 9)], 1, 8, 64, 64, "bfloat16", 128),
  "wide_heads_small_pages": ([(1, 150), (20, 130), (1, 15)], 1, 2, 128, 16, "float16", 128),
  "chunks_of_several_tiles": ([(70, 100), (1, 200), (150, 31)], 1, 1, 64, 64, "bfloat16", 128),
  "chunk_ends_with_its_tile": ([(64, 64), (128, 0), (2, 126)], 1, 1, 64, 64, "bfloat16", 128),
}


def _case(batch, kv_heads, group, dim, page_size, dtype):
  tokens = sum(count for count, _ in batch) + 3
  return Case(
    batch, dtype, kv_heads, group, dim=dim, page_size=page_size, pages=48, num_tokens=tokens,
    q_dtype="float32" if dtype == "bfloat16" else dtype,
  )  # fmt: skip


def _run(case, chunk_keys, blocks=BLOCKS, **options):
  arguments = case.arguments(128, chunk_keys, capacity=32)
  rounded = jnp.asarray(case.q, case.pool.dtype)
  case.q = np.asarray(rounded, np.float32)
  arguments = {k: v if k == "query_tile" else jnp.asarray(v) for k, v in arguments.items()}
  arguments["q"] = rounded
  arguments["first_page"] = jnp.int32(0)
  out = mosaic_gpu.ragged_paged_attention(
    **arguments, decode_items=8, decode=Decode(blocks=blocks), chunk=Chunk(blocks=blocks),
    interpret=compat.interpreter(), **options,
  )  # fmt: skip
  return np.asarray(out, np.float64)


# Blocks that take several units in turn go through their rings with every phase of the barriers.
@pytest.mark.parametrize("name", ["splits", "chunks_of_several_tiles", "group_of_3"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_blocks_with_several_units_match_the_oracle(blocks, name):
  *shape, chunk_keys = CASES[name]
  case = _case(*shape)
  out = _run(case, chunk_keys, blocks)
  np.testing.assert_allclose(out, case.oracle(), atol=TOLERANCE[shape[-1]])


@pytest.mark.parametrize("name", sorted(CASES))
def test_kernels_match_the_oracle(name):
  *shape, chunk_keys = CASES[name]
  case = _case(*shape)
  out = _run(case, chunk_keys)
  np.testing.assert_allclose(out, case.oracle(), atol=TOLERANCE[shape[-1]])


@pytest.mark.parametrize("window, soft_cap", [(9, None), (100, 5.0)])
def test_windows_and_caps_match_the_oracle(window, soft_cap):
  case = _case([(1, 300), (70, 190), (1, 20), (3, 0)], 1, 2, 64, 32, "bfloat16")
  case.poison_before(window)
  out = _run(case, 128, blocks=2, window=window, soft_cap=soft_cap)
  np.testing.assert_allclose(out, case.oracle(window, soft_cap), atol=TOLERANCE["bfloat16"])


def test_short_queries_share_the_tile_of_a_decode():
  # Up to 4 tokens a row, as with drafts; the second row's fill two of its four places.
  batch, group = [(4, 200), (2, 126), (1, 0)], 3
  case = _case(batch, 2, group, 64, 64, "bfloat16")
  arguments = case.arguments(4, None, capacity=8)
  q = jnp.asarray(case.q, jnp.bfloat16)
  case.q = np.asarray(q, np.float32)
  work, starts = np.zeros((8, 8), np.int32), [0, 4, 6]
  items = [
    (row, starts[row], count, context, 128 * split, min(context + count, 128 * (split + 1)), split,
     -(-(context + count) // 128))
    for row, (count, context) in enumerate(batch)
    for split in range(-(-(context + count) // 128))
  ]  # fmt: skip
  work[: len(items)] = items
  pools = [jnp.asarray(arguments[k]).reshape(-1, 2 * 64) for k in ("k_pages", "v_pages")]
  out = mosaic_gpu_decode.attend(
    Attention(kv_heads=2, group=group, head_dim=64, page_size=64, interpretable=True),
    Decode(queries=4),
    len(items) + 1,
    work=jnp.asarray(work),
    num_work=jnp.asarray([len(items)] * 2, jnp.int32),
    block_tables=jnp.asarray(arguments["block_tables"]),
    first_page=jnp.zeros(1, jnp.int32),
    q=q,
    k_pool=pools[0],
    v_pool=pools[1],
    out=jnp.zeros(q.shape, q.dtype),
    interpret=compat.interpreter(),
  )
  np.testing.assert_allclose(np.asarray(out, np.float64), case.oracle(), atol=TOLERANCE["bfloat16"])


def test_first_page_shifts_every_page():
  case = _case([(1, 70), (5, 60)], 1, 2, 64, 64, "bfloat16")
  expected = _run(case, 128)
  shift = min(min(row.pages) for row in case.rows)
  assert shift > 0
  case.table = np.maximum(case.table - shift, 0)
  arguments = case.arguments(8, 128, capacity=32)
  arguments["q"] = jnp.asarray(case.q, jnp.bfloat16)
  out = mosaic_gpu.ragged_paged_attention(
    **arguments, decode_items=8, first_page=shift, interpret=compat.interpreter()
  )
  np.testing.assert_array_equal(np.asarray(out, np.float64), expected)
