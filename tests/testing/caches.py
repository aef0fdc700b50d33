"""A folder of compiled executables that all tests of a run share, whatever their process."""

import os
import pathlib

VARIABLE = "JAXSERVE_TEST_CACHE"  # set by conftest


def cache_dir() -> pathlib.Path:
  return pathlib.Path(os.environ[VARIABLE])
