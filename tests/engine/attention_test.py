"""The choice of an implementation of attention, for devices that need not be here."""

import dataclasses
import importlib.util
import subprocess
import sys

import jax
import numpy as np
import pytest
from absl import logging

from jaxserve.config import SplitKV
from jaxserve.engine import attention, devices, programs
from jaxserve.engine.config import EngineConfig
from jaxserve.engine.store import fingerprint
from jaxserve.model import kv_cache
from pallas_kernels.ragged_paged_attention import unsupported
from tests.testing.engines import MODEL, SCHEDULER, tiny_engine

CPU = attention.Target(platform="cpu", kind="cpu")
H200 = attention.Target(platform="gpu", kind="NVIDIA H200", compute_capability="9.0", num_sms=132)
LLAMA = dataclasses.replace(MODEL, num_heads=32, num_kv_heads=8, head_dim=128)
FITS = dict(
  platform="gpu", compute_capability="9.0", head_dim=128, group=4, page_size=64, dtype="bfloat16"
)


def choose(wanted="auto", target=H200, model=LLAMA, page_size=64, dtype="bfloat16"):
  return attention.choose(wanted, target, model, page_size, dtype)


@pytest.mark.parametrize(
  "fields",
  [{}, dict(head_dim=64), dict(page_size=16), dict(dtype="float16"), dict(group=8),
   dict(compute_capability="9.1"), dict(dtype=np.dtype("float16"))],
)  # fmt: skip
def test_hopper_is_supported(fields):
  assert unsupported("mosaic_gpu", **(FITS | fields)) is None


@pytest.mark.parametrize(
  "fields, word",
  [
    (dict(platform="cpu", compute_capability=None), "cpu"), (dict(compute_capability="8.0"), "8.0"),
    (dict(compute_capability="10.0"), "10.0"), (dict(head_dim=96), "head_dim=96"),
    (dict(head_dim=256), "head_dim=256"), (dict(group=9), "9 query heads"),
    (dict(page_size=8), "page_size=8"), (dict(dtype="float32"), "float32"),
  ],
)  # fmt: skip
def test_reasons_against_mosaic_gpu(fields, word):
  assert word in unsupported("mosaic_gpu", **(FITS | fields))
  for other in ("xla", "ref"):
    assert unsupported(other, **(FITS | fields)) is None


def test_an_unknown_implementation_is_refused():
  with pytest.raises(NotImplementedError, match="no implementation 'cuda'"):
    unsupported("cuda", **FITS)


@pytest.fixture
def logged(monkeypatch):
  lines = []
  monkeypatch.setattr(logging, "log", lambda level, text, *args: lines.append((level, text % args)))
  monkeypatch.setattr(logging, "info", lambda *args: logging.log(logging.INFO, *args))
  return lines


@pytest.fixture
def without_numba(monkeypatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "numba" else find(n))


def test_a_cpu_without_numba_gets_xla_without_a_warning(logged, without_numba):
  assert choose(target=CPU) == attention.Choice(implementation="xla")
  why = "numba is missing: pip install 'jaxserve[cpu]'"
  assert logged == [(logging.INFO, f"attention: xla ({why})")]


def test_asking_for_numba_without_it_says_what_to_install(without_numba):
  with pytest.raises(NotImplementedError, match=r"'numba'.*pip install 'jaxserve\[cpu\]'"):
    choose("numba", CPU)


def test_a_numba_that_cannot_be_imported_costs_the_speed_alone(logged, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
  monkeypatch.setitem(attention.IMPLEMENTATIONS, "numba", "pallas_kernels.no_such_module")
  assert choose(target=CPU) == attention.Choice(implementation="xla")
  assert "numba cannot be imported: No module named" in logged[0][1]


def test_a_cpu_gets_numba_for_bfloat16(logged):
  pytest.importorskip("numba", reason="numba is missing: pip install 'jaxserve[cpu]'")
  for wanted in ("auto", "numba"):
    assert choose(wanted, CPU) == attention.Choice(implementation="numba")
  assert logged == 2 * [(logging.INFO, "attention: numba for decodes, xla for prompts")]
  for dtype in ("float32", "int8"):
    assert choose(target=CPU, dtype=dtype) == attention.Choice(implementation="xla")
    with pytest.raises(NotImplementedError, match=f"'numba': dtype {dtype} is not bfloat16"):
      choose("numba", CPU, dtype=dtype)
  with pytest.raises(NotImplementedError, match="'numba': platform 'gpu' is not a CPU"):
    choose("numba", H200)


def test_a_hopper_gpu_gets_its_kernels_and_splits(logged):
  for wanted in ("auto", "mosaic_gpu"):
    assert choose(wanted) == attention.Choice(
      implementation="mosaic_gpu", query_tile=128, splits=SplitKV(capacity=49)
    )
  assert logged == 2 * [(logging.INFO, "attention: mosaic_gpu on NVIDIA H200, 132 SMs")]


def test_a_gpu_without_kernels_gets_xla_with_a_warning(logged):
  a100 = dataclasses.replace(H200, kind="NVIDIA A100", compute_capability="8.0")
  silent = dataclasses.replace(H200, num_sms=None)
  for fields in (dict(target=a100), dict(dtype="float32"), dict(model=MODEL), dict(target=silent)):
    assert choose(**fields) == attention.Choice(implementation="xla")
  assert [level for level, _ in logged] == [logging.WARNING] * 4
  assert "compute capability 8.0" in logged[0][1] and "head_dim=6" in logged[2][1]


def test_explicit_mosaic_gpu_raises_with_the_reason():
  with pytest.raises(NotImplementedError, match=r"attention='mosaic_gpu'.*'cpu'.*use 'auto'"):
    choose("mosaic_gpu", CPU)
  for splits in (None, SplitKV(capacity=3)):
    config = EngineConfig(model=MODEL, scheduler=SCHEDULER, attention="mosaic_gpu", splits=splits)
    with pytest.raises(NotImplementedError, match="'cpu' is not a GPU"):
      attention.resolve(config, jax.devices()[0])


@pytest.mark.parametrize("wanted", ["xla", "ref"])
def test_what_is_asked_for_is_taken(wanted):
  assert choose(wanted) == attention.Choice(implementation=wanted)


def test_resolving_fills_in_the_config():
  config = EngineConfig(model=LLAMA, scheduler=SCHEDULER)
  chosen = choose().applied(config)
  assert (chosen.attention, chosen.query_tile) == ("mosaic_gpu", 128)
  shape = chosen.plan_shape(61)
  assert (shape.query_tile, shape.num_decode_items, shape.num_work_items) == (61, 54, 55)
  float32 = dataclasses.replace(config, dtype="float32")
  here = attention.resolve(float32, jax.devices()[0])
  assert (here.attention, here.query_tile, here.splits) == ("xla", 512, None)
  assert attention.resolve(here, jax.devices()[0]) is here


def test_a_cpu_run_does_not_import_the_gpu_kernels_nor_numba_before_it_is_chosen():
  code = (
    "import sys, jaxserve.engine.startup, pallas_kernels.ragged_paged_attention.api as api\n"
    "api.load('xla')\n"
    "found = [n for n in sys.modules if n.startswith('pallas_kernels') and 'mosaic' in n]\n"
    "sys.exit(bool(found) or 'numba' in sys.modules or 'llvmlite' in sys.modules)"
  )
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pages_are_bits_on_a_cpu_only():
  stored = {p: kv_cache.storage_dtype(np.dtype("bfloat16"), p).name for p in ("cpu", "gpu", "tpu")}
  assert stored == {"cpu": "uint16", "gpu": "bfloat16", "tpu": "bfloat16"}
  assert kv_cache.storage_dtype(np.dtype("float32"), "cpu") == np.float32


def test_executables_of_other_splits_are_others():
  found = set()
  for splits in (None, SplitKV(capacity=3), SplitKV(capacity=4)):
    config = EngineConfig(model=MODEL, scheduler=SCHEDULER, attention="xla", splits=splits)
    made = programs.scheduler_programs(config, devices.pick())
    found |= {fingerprint(p) for p in made if p.key[:2] == ("lay_out", SCHEDULER.max_budget)}
  assert len(found) == 3 and None not in found


def test_an_engine_with_splits_yields_the_same_bits():
  """The XLA path computes split decodes whole, so only the lists differ."""
  prompts = [list(range(1, n)) for n in (3, 19, 30, 41)]
  plain, split = tiny_engine(), tiny_engine(splits=SplitKV(capacity=7, tile=2, min_keys=4))
  assert (
    split.config.plan_shape(61).num_work_items == 7 + plain.config.plan_shape(61).num_work_items
  )
  expected = [(c.tokens, c.logprobs) for c in plain.generate(prompts)]
  assert [(c.tokens, c.logprobs) for c in split.generate(prompts)] == expected
  assert split.retraces == 0
