"""Decodes in the kernel that numba compiles, against attention written out in float64."""

import ctypes
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.attention import Case

pytest.importorskip("numba", reason="numba is missing: pip install 'jaxserve[cpu]'")

from pallas_kernels.ragged_paged_attention import numba_cpu, unsupported  # noqa: E402

# Sums are float32 and products of what is stored, so decodes are as exact as float32; chunks not.
DECODES, CHUNKS = 3e-6, 2e-2
BATCHES = {
  "one": [(1, 0)],
  "decodes": [(1, 16), (1, 4), (1, 5), (1, 0)],
  "mixed": [(1, 3), (1, 29), (11, 2), (1, 50), (2, 7), (3, 0)],
  "chunks": [(13, 0), (7, 11)],
}
CONTEXTS = [140, 600, 3, 63, 64, 127, 300]


def assert_close(case, out, window=None):
  expected, at = case.oracle(window), 0
  for row in case.rows:
    own = slice(at, at + row.tokens)
    limit = DECODES if row.tokens == 1 else CHUNKS
    np.testing.assert_allclose(out[own], expected[own], atol=limit)
    at += row.tokens
  assert not out[at:].any()


@pytest.mark.parametrize("dtype, window", [("bfloat16", None), ("uint16", None), ("uint16", 3)])
@pytest.mark.parametrize("batch", sorted(BATCHES))
def test_ragged_batches_match_the_oracle(batch, dtype, window):
  case = Case(BATCHES[batch], dtype, kv_heads=2, group=3)
  if window:
    case.poison_before(window)
  assert_close(case, case.run("numba", 7, window=window), window)


@pytest.mark.parametrize(
  "kv_heads, group, dim",
  [(1, 1, 2), (3, 3, 64), (2, 4, 128), (1, 2, 80)],
)
def test_heads_of_every_size_match_the_oracle(kv_heads, group, dim):
  batch = [(1, n) for n in CONTEXTS]
  case = Case(batch, "uint16", kv_heads, group, dim=dim, page_size=64, pages=64)
  np.testing.assert_allclose(_decodes(case, None), case.oracle(), atol=DECODES)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_other_pages_are_those_of_xla(dtype):
  case = Case(BATCHES["mixed"], dtype, 2, 3)
  np.testing.assert_array_equal(case.run("numba", 7), case.run("xla", 7))


def test_soft_cap_and_odd_heads_are_those_of_xla():
  case = Case(BATCHES["mixed"], "uint16", 2, 3)
  capped = [case.run(name, 7, soft_cap=0.7) for name in ("numba", "xla")]
  np.testing.assert_array_equal(*capped)
  case = Case(BATCHES["mixed"], "uint16", 2, 3, dim=5)
  np.testing.assert_array_equal(case.run("numba", 7), case.run("xla", 7))


@pytest.mark.parametrize("chunk_keys", [4, 8, 48])
def test_split_decodes_have_the_bits_of_whole_ones(chunk_keys):
  case = Case(BATCHES["mixed"], "uint16", 2, 3)
  np.testing.assert_array_equal(case.run("numba", 7, chunk_keys=chunk_keys), case.run("numba", 7))


def test_first_page_shifts_every_page():
  case = Case(BATCHES["mixed"], "uint16", 2, 3)
  expected = case.run("numba", 7)
  shift = min(min(row.pages) for row in case.rows)
  case.table = np.maximum(case.table - shift, 0)
  np.testing.assert_array_equal(case.run("numba", 7, first_page=shift), expected)


@st.composite
def cases(draw):
  lengths = draw(st.lists(st.integers(0, 54), min_size=1, max_size=7))
  pages = sum(n // 5 + 1 for n in lengths) + 1
  case = Case([(1, n) for n in lengths], "uint16", 2, 3, pages=max(pages, 37))
  # What lies past a row's pages is never read, not even as a page id.
  junk = draw(st.sampled_from([0, -1, 2**31 - 1, -(2**31)]))
  for r, row in enumerate(case.rows):
    case.table[r, len(row.pages) :] = junk
  window = draw(st.none() | st.integers(1, 60))
  if window:
    case.poison_before(window)
  return case, window


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 43), st.integers(1, 8))
def test_any_pages_match_the_oracle_whatever_the_neighbours(drawn, tokens, parts):
  case, window = drawn
  together = _decodes(case, window)
  np.testing.assert_allclose(together, case.oracle(window), atol=DECODES)
  i = tokens % len(case.rows)
  alone = case.alone(i, case.rows[i])
  alone.q = alone.q[: max(1, tokens // 8)]
  np.testing.assert_array_equal(_decodes(alone, window, parts)[0], together[i])


def _decodes(case, window, parts=8):
  """The kernel by itself: no chunk part that would clip page ids."""
  given_ = case.arguments(1)
  names = ("q", "k_pages", "v_pages", "block_tables", "work", "num_work")
  old, numba_cpu._MOST_PARTS = numba_cpu._MOST_PARTS, parts
  try:
    out = numba_cpu._decodes(*(jnp.asarray(given_[n]) for n in names), 0, window)
  finally:
    numba_cpu._MOST_PARTS = old
  return np.asarray(out).reshape(case.q.shape)


@pytest.mark.parametrize("window", [None, 70])
def test_results_do_not_depend_on_neighbours_nor_on_the_number_of_calls(monkeypatch, window):
  case = Case([(1, n) for n in CONTEXTS], "uint16", 3, 2, dim=64, page_size=64, pages=64)
  together = case.run("numba", 1, window=window)
  for i, row in enumerate(case.rows):
    np.testing.assert_array_equal(case.alone(i, row).run("numba", 1, window=window)[0], together[i])
  monkeypatch.setattr(os, "cpu_count", lambda: 3)
  for most in (1, 2, 3):
    monkeypatch.setattr(numba_cpu, "_MOST_PARTS", most)
    np.testing.assert_array_equal(_decodes(case, window, most), together)


def test_padding_items_are_ignored():
  case = Case(BATCHES["decodes"], "uint16", 2, 3)
  expected, given_ = case.run("numba", 1), case.arguments(1)
  given_["work"][len(case.rows) :] = 2**31 - 1
  out = numba_cpu.ragged_paged_attention(**{k: jnp.asarray(v) if k != "query_tile" else v
                                            for k, v in given_.items()})  # fmt: skip
  np.testing.assert_array_equal(out, expected)


def test_calls_share_no_buffer_and_read_the_pages_in_place():
  """One buffer for two calls would make XLA run them one after another."""
  case = Case(BATCHES["decodes"], "uint16", 2, 3)
  names = ("q", "k_pages", "v_pages", "block_tables", "work", "num_work")
  arguments = [jnp.asarray(case.arguments(1)[n]) for n in names]
  call = jax.jit(lambda *a: numba_cpu._decodes(*a, 0, None))
  text = call.lower(*arguments).compile().as_text()
  parts = min(os.cpu_count(), numba_cpu._MOST_PARTS)
  assert text.count("custom-call(") == parts
  assert " copy(" not in text


def test_reasons_against_it():
  fits = dict(
    platform="cpu", compute_capability=None, head_dim=64, group=3, page_size=64, dtype="bfloat16"
  )
  assert unsupported("numba", **fits) is None
  for field, value, word in (
    ("platform", "gpu", "not a CPU"), ("dtype", "float32", "not bfloat16"),
    ("dtype", "int8", "not bfloat16"), ("head_dim", 65, "odd"),
  ):  # fmt: skip
    assert word in unsupported("numba", **(fits | {field: value}))


def test_the_kernel_is_read_from_the_folder_that_is_named(tmp_path):
  code = (
    "import pathlib, sys\n"
    "from pallas_kernels.ragged_paged_attention import numba_cpu as n\n"
    "n.register(2, 1, 6, 5, pathlib.Path(sys.argv[1]))\n"
    "print(next(iter(n._targets.values()))[1].cache_hits)"
  )
  run = lambda: subprocess.run(
    [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
  ).stdout.split()
  assert run() == ["0"] and any(tmp_path.rglob("*.nbi"))
  assert run() == ["1"]


def test_a_folder_that_cannot_be_written_costs_a_compilation(tmp_path):
  blocked = tmp_path / "file"
  blocked.write_text("")
  assert numba_cpu.register(2, 1, 8, 7, blocked).endswith("_2_1_8_7")


def test_a_frame_of_unknown_size_is_refused_and_metadata_answered():
  """XLA's structs by hand: fields are words, but for pairs of 4 bytes."""
  numba_cpu.register(2, 1, 6, 5)
  call = numba_cpu._targets[2, 1, 6, 5][1].ctypes
  said = []

  def create(arguments):
    said.append(ctypes.string_at(ctypes.c_uint64.from_address(arguments + 16).value))
    return 77

  create = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)(create)
  words = lambda *values: (ctypes.c_uint64 * 21)(*values)
  api = words(0, 0, 0, 0, 0, 0, ctypes.cast(create, ctypes.c_void_p).value)
  frame = words(100, 0, ctypes.addressof(api), 0, 3)
  assert call(ctypes.addressof(frame)) == 77
  assert said == [b"the frame of an FFI call is of a size that jaxserve does not know"]

  metadata = words(48, 24, 0, 2**64 - 1, 2**64 - 1)
  extension = words(32, 1, 0, ctypes.addressof(metadata))
  assert call(ctypes.addressof(words(168, ctypes.addressof(extension)))) == 0
  assert list(metadata)[3:5] == [3 << 32, 0xFFFFFFFF << 32]  # version 0.3; no traits
  assert call(ctypes.addressof(words(168, 0, 0, 0, 1))) == 0  # a stage before the execution
