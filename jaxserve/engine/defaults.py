"""Defaults that depend on the device: budget, seats, size of the KV pool."""

import dataclasses
import os
from typing import Literal

import jax

Use = Literal["offline", "server"]

_GIB = 1 << 30
# (memory from, budget offline, budget as a server, seats): vLLM V1's defaults by device memory.
_BY_MEMORY = (
  (160 * _GIB, 16384, 16384, 1024),
  (70 * _GIB, 16384, 8192, 1024),
  (0, 8192, 2048, 256),
)
CPU_KV_CACHE_TOKENS = 32768
ACCELERATOR_MEMORY_FRACTION = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Token budget of a step and seats."""

  budget: int
  max_num_seqs: int


def memory_bytes(device: jax.Device) -> int:
  """Memory of the device; of the machine for a CPU."""
  stats = device.memory_stats() if device.platform != "cpu" else None
  if stats and "bytes_limit" in stats:
    return int(stats["bytes_limit"])
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def by_device(platform: str, kind: str, memory: int, use: Use) -> Limits:
  """Budget and seats by device memory and use. CPUs and the A100 count as small.

  Args:
    platform: "cpu", "gpu", "tpu".
    kind: the device's name, as JAX tells it.
    memory: bytes.
    use: "offline" favours throughput, "server" latency.
  """
  small = platform == "cpu" or "A100" in kind
  for least, offline, server, seats in _BY_MEMORY:
    if (0 if small else memory) >= least:
      return Limits(budget=offline if use == "offline" else server, max_num_seqs=seats)
  raise AssertionError("the last row holds for any memory")


def clamped(
  limits: Limits, budget: int | None, max_num_seqs: int | None, max_model_len: int
) -> Limits:
  """Explicit values as they are; defaulted ones cut to what can be used.

  A defaulted budget is cut to max_num_seqs * max_model_len, defaulted seats to the budget.
  """
  seats = limits.max_num_seqs if max_num_seqs is None else max_num_seqs
  if budget is None:
    budget = max(min(limits.budget, seats * max_model_len), 1)
  if max_num_seqs is None:
    seats = min(seats, budget)
  return Limits(budget=budget, max_num_seqs=seats)


def describe_hardware() -> str:
  """One line for a record of a run: device, cores, JAX version."""
  device = jax.devices()[0]
  cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
  return f"{device.device_kind}{cores}, jax {jax.__version__}"
