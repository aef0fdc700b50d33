"""What the device in use achieves: the table for known GPUs, a measurement for the rest."""

import dataclasses

import jax
import pytest

from jaxserve import cost
from jaxserve.engine import hardware


@dataclasses.dataclass
class FakeDevice:
  device_kind: str
  platform: str = "gpu"


def test_a_known_gpu_is_not_measured():
  assert hardware.find(FakeDevice("NVIDIA H100 80GB HBM3"), "bfloat16") is cost.H100


@pytest.mark.parametrize(
  ("kind", "dtype"), [("NVIDIA H100 PCIe", "bfloat16"), ("NVIDIA H100 80GB HBM3", "float32")]
)
def test_other_gpus_and_other_dtypes_are_measured(monkeypatch, kind, dtype):
  monkeypatch.setattr(hardware, "measure", lambda device, dtype: (device.device_kind, dtype))
  assert hardware.find(FakeDevice(kind), dtype) == (kind, dtype)


def test_a_cpu_is_measured(monkeypatch):
  monkeypatch.setattr(hardware, "_CPU_WIDTH", 64)
  monkeypatch.setattr(hardware, "_READ_BYTES", 1 << 20)
  found = hardware.find(jax.devices()[0], "float32")
  assert found.name == "this cpu"
  assert found.flops == hardware.PRODUCT_SHARE * found.spec_flops > 0
  assert found.bandwidth == hardware.READ_SHARE * found.spec_bandwidth > 0


def test_the_time_is_the_median_of_calls_after_the_first(monkeypatch):
  ticks = iter([0.0, 0.5, 1.0, 1.1, 2.0, 2.3])
  monkeypatch.setattr(hardware.clock, "now", lambda: next(ticks))
  calls = []
  assert hardware._seconds(lambda x: calls.append(x) or x, 1.0) == pytest.approx(0.3)
  assert len(calls) == 4
