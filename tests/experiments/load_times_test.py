"""Loading holds a model once: the peak of memory, in a process of its own."""

import dataclasses
import sys

import pytest

from experiments.load_times import measure
from jaxserve.model import native, source

pytestmark = pytest.mark.one_leg

# 84 million parameters, no array more than a tenth of them.
CONFIG = dataclasses.replace(
  measure.LLAMA_1B, vocab_size=16001, hidden_size=512, intermediate_size=2048, num_layers=18,
  num_heads=8, num_kv_heads=8,
)  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="not available: peaks of memory, in /proc")
def test_peak_memory_is_below_1_3_times_the_checkpoint(tmp_path, monkeypatch):
  # Groups as small for this model as they are for a large one.
  monkeypatch.setattr(native, "_GROUP_BYTES", 1 << 24)
  measure.write_checkpoint(tmp_path / "m", CONFIG)
  source.convert(str(tmp_path / "m"), tmp_path / "native", tmp_path)
  for model, libraries in (("m", 0), ("native", 32e6)):  # What Orbax takes when first used.
    load = measure.load(str(tmp_path / model))
    assert load.file_bytes >= 2 * CONFIG.num_params
    assert 0.9 * load.file_bytes < load.peak_bytes < 1.3 * load.file_bytes + libraries, load
