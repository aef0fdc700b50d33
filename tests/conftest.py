"""Settings of every test. JAX is told before it starts a backend, hence at import."""

import gc
import os
import pathlib
import shutil
import sys
import tempfile

import hypothesis
import pytest

# Before JAX is imported: with the extra gpu-aot it would look for a driver.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax  # noqa: E402

from tests.testing import caches  # noqa: E402

# The scheduler gets a CPU device of its own, beside the model's.
jax.config.update("jax_num_cpu_devices", 2)
# A silent broadcast or a silent change of type is how a wrong shape becomes a wrong number.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The first example compiles, so a deadline would measure XLA.
hypothesis.settings.register_profile("jaxserve", deadline=None, print_blob=True)
hypothesis.settings.load_profile("jaxserve")


# Every executable of XLA:CPU is a few mappings of memory, of which Linux gives a process 65,530;
# when they are used up, the next compilation aborts it.
MOST_MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def forgets_executables():
  """Drops what earlier modules compiled, once it is much; they share little of it."""
  yield
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
    _forget_engines()
    jax.clear_caches()
    gc.collect()


def _forget_engines():
  """Empties the caches of test modules: the engines in them keep their executables."""
  for name in [name for name in sys.modules if name.startswith("tests.")]:
    for value in list(vars(sys.modules[name]).values()):
      if callable(clear := getattr(value, "cache_clear", None)):
        clear()


def pytest_configure(config):
  if not hasattr(config, "workerinput"):  # workers inherit it
    os.environ[caches.VARIABLE] = tempfile.mkdtemp(prefix="jaxserve-tests-")


def pytest_unconfigure(config):
  if not hasattr(config, "workerinput"):
    shutil.rmtree(os.environ.pop(caches.VARIABLE), ignore_errors=True)
