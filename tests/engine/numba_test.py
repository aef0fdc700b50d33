"""An engine whose decodes run in the kernel that numba compiles, and its executables kept."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxserve.engine import SamplingParams, attention
from jaxserve.engine.config import EngineConfig
from tests.testing.engines import MODEL, SCHEDULER, build_engine, shared_store

pytest.importorskip("numba", reason="numba is missing: pip install 'jaxserve[cpu]'")

PROMPTS = [[5, 6, 7], [1] * 20, list(range(1, 42)), [9]]
FIELDS = dict(dtype="bfloat16", token_buckets=(8, 61))


def outputs(engine):
  done = engine.generate(PROMPTS, SamplingParams(max_tokens=8))
  return [(d.tokens, d.logprobs) for d in done]


def test_an_engine_agrees_with_xla_and_traces_nothing():
  """Tokens may part at a near tie; what was said up to there has the same probabilities."""
  engine = build_engine(shared_store(), **FIELDS, attention="numba")
  assert engine.config.attention == "numba"
  found = outputs(engine)
  assert outputs(engine) == found and engine.retraces == 0
  other = build_engine(shared_store(), **FIELDS, attention="xla")
  expected = outputs(other)
  for (tokens, logprobs), (others, other_logprobs) in zip(found, expected, strict=True):
    same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), None)
    np.testing.assert_allclose(logprobs[:same], other_logprobs[:same], atol=0.05)
    assert same is None or same > 0
  engine.close()
  other.close()


def test_auto_takes_it_for_bfloat16():
  config = EngineConfig(model=MODEL, scheduler=SCHEDULER)
  assert attention.resolve(config, jax.devices()[0]).attention == "numba"


START = """
import pathlib, sys
from jaxserve.engine import devices
devices.set_up()
from jaxserve.engine.store import ExecutableStore
from tests.engine.numba_test import FIELDS, outputs
from tests.testing.engines import build_engine
engine = build_engine(ExecutableStore(pathlib.Path(sys.argv[1])), **FIELDS, attention="numba")
said, reports = outputs(engine), engine.compile_reports
print(all(r.cache_hit and r.trace_s == 0 for r in reports), engine.retraces, said, sep="|")
"""


def test_another_process_reads_what_calls_the_kernel(tmp_path):
  def start():
    command = [sys.executable, "-c", START, str(tmp_path / "executables")]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return run.stdout.splitlines()[-1].split("|")

  first, again = start(), start()
  assert any((tmp_path / "kernels").rglob("*.nbi"))
  assert again[:2] == ["True", "0"] and again[2] == first[2]
