"""One suite over implementations and dtypes, against attention written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.testing.attention import Case

PORTABLE = ("ref", "xla")  # what runs on any device
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "uint16": 2e-2, "int8": 2e-2}

# (tokens of the step, tokens before it) of every row.
BATCHES = {
  "one_decode": [(1, 0)],
  "decodes": [(1, 16), (1, 4), (1, 5), (1, 0)],
  "page_boundaries": [(5, 0), (5, 5), (4, 1), (6, 4), (1, 9), (1, 10)],
  "chunks": [(13, 0), (7, 11)],
  "mixed": [(1, 3), (1, 29), (11, 2), (1, 50), (2, 7), (3, 0)],
  "unsorted": [(7, 3), (1, 8), (5, 20)],
}


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("batch", sorted(BATCHES))
def test_ragged_batches_match_the_oracle(batch, dtype, implementation):
  case = Case(BATCHES[batch], dtype, kv_heads=2, group=3)
  out = case.run(implementation, query_tile=7)
  np.testing.assert_allclose(out, case.oracle(), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("kv_heads, group", [(1, 1), (2, 2), (1, 4)])
def test_head_groups_match_the_oracle(kv_heads, group, implementation):
  case = Case(BATCHES["mixed"], "float32", kv_heads, group)
  out = case.run(implementation, query_tile=11)
  np.testing.assert_allclose(out, case.oracle(), atol=TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_contexts_of_several_tiles_match_the_oracle(dtype):
  # 1 decode and 1 chunk past two tiles of 256 and 512 keys, so the loops without a mask run too.
  batch = [(1, 700), (37, 1100), (2, 511), (1, 256)]
  case = Case(batch, dtype, 1, 2, page_size=128)
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
    np.testing.assert_array_equal(case.alone(i, row).run("xla", 1)[0], together[i])


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("chunk_keys", [4, 8, 48])
def test_split_decodes_have_the_bits_of_whole_ones(chunk_keys, implementation):
  case = Case(BATCHES["mixed"], "uint16", 2, 3)
  whole = case.run(implementation, 7)
  np.testing.assert_array_equal(case.run(implementation, 7, chunk_keys=chunk_keys), whole)
  np.testing.assert_allclose(whole, case.oracle(), atol=TOLERANCE["uint16"])


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("window", [1, 3, 17])
@pytest.mark.parametrize("batch", ["decodes", "mixed", "unsorted"])
def test_window_hides_what_lies_before_it(batch, window, dtype, implementation):
  case = Case(BATCHES[batch], dtype, 2, 3)
  case.poison_before(window)
  out = case.run(implementation, 7, window=window, chunk_keys=4)
  np.testing.assert_allclose(out, case.oracle(window), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("window", [100, 300, 2000])
def test_windows_of_several_tiles_match_the_oracle(window, dtype):
  batch = [(1, 1200), (37, 1100), (2, 511), (1, 256), (1, 1000), (1, 30)]
  case = Case(batch, dtype, 1, 2, page_size=128)
  case.poison_before(window)
  out = case.run("xla", query_tile=37, window=window)
  np.testing.assert_allclose(out, case.oracle(window), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("contexts", sorted(GROUPS))
def test_windowed_decodes_match_the_oracle_and_do_not_depend_on_neighbours(contexts):
  case = Case([(1, n) for n in GROUPS[contexts]], "uint16", 3, 2, page_size=64, pages=64)
  case.poison_before(70)
  together = case.run("xla", 1, window=70)
  np.testing.assert_allclose(together, case.oracle(70), atol=TOLERANCE["uint16"])
  for i, row in enumerate(case.rows):
    np.testing.assert_array_equal(case.alone(i, row).run("xla", 1, window=70)[0], together[i])


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("soft_cap, window", [(0.7, None), (20.0, None), (0.7, 6)])
def test_soft_cap_matches_the_oracle(soft_cap, window, dtype, implementation):
  case = Case(BATCHES["mixed"], dtype, 2, 3)
  case.q *= 3
  out = case.run(implementation, 7, soft_cap=soft_cap, window=window)
  expected = case.oracle(window, soft_cap)
  np.testing.assert_allclose(out, expected, atol=TOLERANCE[dtype])
  assert np.abs(expected - case.oracle(window)).max() > 2 * TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("query_tile", [1, 19])
def test_result_does_not_depend_on_the_query_tile(query_tile, implementation):
  case = Case(BATCHES["mixed"], "float32", 2, 3)
  np.testing.assert_allclose(case.run(implementation, query_tile), case.oracle(), atol=2e-6)


@pytest.mark.parametrize("implementation", PORTABLE)
def test_first_page_shifts_every_page(implementation):
  case = Case(BATCHES["mixed"], "float32", 2, 3)
  expected = case.run(implementation, 7)
  # The first page that is in use becomes page 0 of the tables.
  shift = min(min(row.pages) for row in case.rows)
  assert shift > 0
  case.table = np.maximum(case.table - shift, 0)
  np.testing.assert_array_equal(case.run(implementation, 7, first_page=shift), expected)


@pytest.mark.parametrize("implementation", PORTABLE)
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
  case.pool = np.zeros_like(case.pool, np.int16)
  with pytest.raises(NotImplementedError, match="pages of int16"):
    case.run("xla", 1)
  with pytest.raises(NotImplementedError, match="'mosaic_gpu': int8 pages"):
    Case(BATCHES["one_decode"], "int8", 1, 1).run("mosaic_gpu", 1)


def test_shapes_that_do_not_fit_raise():
  case = Case(BATCHES["one_decode"], "float32", 2, 1)
  case.q = case.q[:, :1]
  with pytest.raises(ValueError, match="does not fit pages"):
    case.run("xla", 1)
  case.q = jnp.zeros((2, 2, 6))
  with pytest.raises(ValueError, match="query_tile=3"):
    case.run("xla", 3)
  case = Case(BATCHES["one_decode"], "int8", 2, 1)
  case.scales = case.scales[..., :1]
  with pytest.raises(ValueError, match="k_scales .* one a head and slot"):
    case.run("xla", 1)
  case.scales = None
  with pytest.raises(ValueError, match="scales go with int8 pages"):
    case.run("xla", 1)
