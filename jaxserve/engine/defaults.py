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
_LARGEST_BUDGET = 16384
# (decoders, tokens of context of each) that a latency target is kept for.
_CPU_DECODERS, _ACCELERATOR_DECODERS = (8, 512), (32, 2048)
CPU_KV_CACHE_TOKENS = 32768
ACCELERATOR_MEMORY_FRACTION = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Token budget of a step and seats."""

  budget: int
  max_num_seqs: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
  """The load under which a budget must keep its latency target.

  Attributes:
    decoders: requests that decode while a long prompt is prefilled.
    context: tokens cached by each of them.
    max_prefix: longest prefix that a chunk may have to attend to.
    page_size: tokens of a KV page.
    max_budget: most that a larger budget could be of use, or that is compiled for.
  """

  decoders: int
  context: int
  max_prefix: int
  page_size: int
  max_budget: int


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


def target_load(
  platform: str, seats: int, max_num_seqs: int | None, max_model_len: int, page_size: int
) -> Load:
  """What a latency target is kept for, unless the user says otherwise.

  All seats but that of the prompt decode, if the user gave their number; else 8 on a CPU and 32 on
  an accelerator, at 512 and 2,048 tokens of context.

  Args:
    platform: "cpu", "gpu", "tpu".
    seats: by device.
    max_num_seqs: as given by the user.
    max_model_len: most tokens of a request.
    page_size: tokens of a KV page.
  """
  decoders, context = _CPU_DECODERS if platform == "cpu" else _ACCELERATOR_DECODERS
  if max_num_seqs is not None:
    decoders, seats = max(max_num_seqs - 1, 1), max_num_seqs
  return Load(
    decoders=decoders,
    context=min(context, max_model_len),
    max_prefix=max_model_len,
    page_size=page_size,
    max_budget=max(min(_LARGEST_BUDGET, seats * max_model_len), seats),
  )


def describe_hardware() -> str:
  """One line for a record of a run: device, cores, JAX version."""
  device = jax.devices()[0]
  cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
  return f"{device.device_kind}{cores}, jax {jax.__version__}"
