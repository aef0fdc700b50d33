"""The suite notices broken kernels: each mutation below makes a test of `mosaic_gpu_test` fail.

A mutation changes one line in a copy of the sources, and the test runs on the copy in a process of
its own: a missing wait may hang. Not noticed are a missing wait for the queries, because the
interpreter orders a copy before the next one that is awaited; a missing fence before wgmma; and a
buffer released before wgmma has read it, because the interpreter runs wgmma at once.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from pallas_kernels import compat

pytestmark = pytest.mark.skipif(
  not compat.HAS_INTERPRETER,
  reason="needs the interpreter of Mosaic GPU kernels: jax 0.11 or newer",
)
ROOT = pathlib.Path(__file__).parents[2]
KERNELS = pathlib.Path("pallas_kernels/ragged_paged_attention")
STAGES, DECODE, CHUNK = (f"mosaic_gpu_{part}.py" for part in ("stages", "decode", "chunk"))
SMALLEST = "test_kernels_match_the_oracle and smallest"
UNITS = "test_blocks_with_several_units_match_the_oracle and 1-splits"
WINDOW = "test_windows_and_caps_match_the_oracle and 9-None"
TIMEOUT = 300

# (file, line as it is, line as it becomes, the test that fails).
MUTATIONS = {
  "mask_by_one": (STAGES, "visible = key <= query", "visible = key <= query + 1", SMALLEST),
  "window_by_one": (STAGES, "key > query - attention", "key >= query - attention", WINDOW),
  "page_by_one": (STAGES, "row = page * size", "row = (page + 1) * size", SMALLEST),
  "values_behind_the_end_kept": (STAGES, "first + tile_keys > keys.high", "first < 0", SMALLEST),
  "decode_does_not_await_keys": (
    DECODE,
    "plgpu.barrier_wait(shared.loaded[0].at[stage])",
    "",
    SMALLEST,
  ),
  "decode_does_not_await_values": (
    DECODE,
    "plgpu.barrier_wait(shared.loaded[1].at[stage])",
    "",
    SMALLEST,
  ),
  "next_unit_forgets_the_ring": (STAGES, "before + run(block", "0 * run(block", UNITS),
  "merge_does_not_weigh": (DECODE, "part * wide(add)", "part", SMALLEST),
  "chunk_does_not_await_keys": (CHUNK, "pl.when(tile < end)", "pl.when(tile < 0)", SMALLEST),
  "chunk_stores_foreign_rows": (CHUNK, "jnp.int32(size)) != 0", "jnp.int32(size)) >= 0", SMALLEST),
}

# A missing wait is a race of the interpreter's threads: once in a while the copy is there in time.
ATTEMPTS = 4


def _run(root, test):
  return subprocess.run(
    [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", test,
     "tests/pallas_kernels/mosaic_gpu_test.py"],
    cwd=root, env={**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
    capture_output=True, text=True, timeout=TIMEOUT,
  )  # fmt: skip


@pytest.fixture
def copy(tmp_path):
  for folder in ("jaxserve", "pallas_kernels", "tests"):
    ignored = shutil.ignore_patterns("__pycache__", "golden")
    shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
  shutil.copy(ROOT / "pyproject.toml", tmp_path)
  return tmp_path


def test_the_copy_passes_as_it_is(copy):
  child = _run(copy, SMALLEST)
  assert child.returncode == 0 and "1 passed" in child.stdout, child.stdout[-2000:]


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_broken_kernel_is_noticed(name, copy):
  file, old, new, test = MUTATIONS[name]
  path = copy / KERNELS / file
  source = path.read_text()
  assert source.count(old) == 1, f"{old!r} must be in {file} exactly once"
  path.write_text(source.replace(old, new))
  said = ""
  for _ in range(ATTEMPTS):
    try:
      child = _run(copy, test)
    except subprocess.TimeoutExpired:
      return  # a kernel that waits for ever has been noticed
    said = child.stdout
    if child.returncode == 1 and "1 failed" in said:
      return
  pytest.fail(f"{ATTEMPTS} runs noticed nothing: {said[-2000:]}")
