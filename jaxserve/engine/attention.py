"""Which implementation of attention an engine runs, decided once, and what its plans must hold."""

import dataclasses
import importlib
import pathlib

import jax
from absl import logging

from jaxserve.config import ModelConfig, SplitKV, TargetDescription
from jaxserve.engine.config import Attention, EngineConfig
from pallas_kernels.ragged_paged_attention import IMPLEMENTATIONS, Implementation, unsupported

# Queries of one block of the chunk kernel.
_GPU_QUERY_TILE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """What the choice depends on of a device.

  Attributes:
    platform: "cpu", "gpu", "tpu".
    kind: its name, as JAX tells it.
    compute_capability: such as "9.0"; None where there is none.
    num_sms: streaming multiprocessors; None where there are none.
  """

  platform: str
  kind: str
  compute_capability: str | None = None
  num_sms: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """An implementation and the layout of its work.

  Attributes:
    implementation: a key of `pallas_kernels.ragged_paged_attention.IMPLEMENTATIONS`.
    query_tile: most queries of a work item; None: whatever the engine was asked for.
    splits: how decodes are split; None: not.
  """

  implementation: Implementation
  query_tile: int | None = None
  splits: SplitKV | None = None

  def applied(self, config: EngineConfig) -> EngineConfig:
    """`config` with this choice made."""
    query_tile = self.query_tile or config.query_tile
    splits = self.splits or config.splits
    return dataclasses.replace(
      config, attention=self.implementation, query_tile=query_tile, splits=splits
    )


def describe(device: jax.Device) -> Target:
  """The target that a JAX device is."""
  sms = getattr(device, "core_count", None) if device.platform == "gpu" else None
  return Target(
    platform=device.platform,
    kind=device.device_kind,
    compute_capability=getattr(device, "compute_capability", None),
    num_sms=sms,
  )


def choose(
  wanted: Attention, target: Target, model: ModelConfig, page_size: int, dtype: str
) -> Choice:
  """Decides, and says so in one log line: a warning where a GPU does not get its kernels.

  Args:
    wanted: "auto": numba on a CPU and mosaic_gpu on a GPU that it supports, else xla; otherwise
      what it names.
    target: device of the model.
    model: what is served.
    page_size: tokens of a KV page.
    dtype: of pages.

  Raises:
    NotImplementedError: what is wanted is not supported; with the reason.
  """
  if wanted in ("xla", "ref"):
    logging.info("attention: %s (as asked for)", wanted)
    return Choice(implementation=wanted)
  best: Implementation = "numba" if target.platform == "cpu" else "mosaic_gpu"
  name = best if wanted == "auto" else wanted
  reason = _refusal(name, target, model, page_size, dtype)
  if wanted != "auto":
    _require(name, reason)
  if reason is not None:
    level = logging.INFO if target.platform == "cpu" else logging.WARNING
    logging.log(level, "attention: xla (%s)", reason)
    return Choice(implementation="xla")
  if name == "numba" or target.num_sms is None:
    logging.info("attention: numba for decodes, xla for prompts")
    return Choice(implementation="numba")
  logging.info("attention: mosaic_gpu on %s, %d SMs", target.kind, target.num_sms)
  splits = SplitKV.of(TargetDescription(num_sms=target.num_sms), model.num_kv_heads)
  return Choice(implementation="mosaic_gpu", query_tile=_GPU_QUERY_TILE, splits=splits)


def resolve(config: EngineConfig, device: jax.Device) -> EngineConfig:
  """`config` with "auto" replaced by `choose`; as it is where the choice has been made.

  Raises:
    NotImplementedError: see `choose`.
  """
  if config.attention in ("xla", "ref"):
    return config
  target, page_size = describe(device), config.scheduler.cache.page_size
  made = config.attention == "numba" or config.attention == "mosaic_gpu" and config.splits
  if made and config.attention != "auto":
    name = config.attention
    _require(name, _refusal(name, target, config.model, page_size, config.page_dtype))
    return config
  return choose(config.attention, target, config.model, page_size, config.page_dtype).applied(
    config
  )


def register(config: EngineConfig, cache_dir: pathlib.Path | None = None) -> None:
  """Tells XLA what the executables of a resolved `config` call; before any of them is read.

  It compiles kernels of "numba", or waits for a thread that does: 3 s, or 0.5 s where `cache_dir`
  (None: numba's own) has them. Does nothing for others, or the second time.
  """
  if config.attention != "numba":
    return
  numba_cpu = importlib.import_module(IMPLEMENTATIONS["numba"])
  for model, dtype in ((config.model, config.page_dtype), (config.draft_model, config.dtype)):
    if model is not None and numba_cpu.can(dtype, model.head_dim):
      sizes = model.num_heads, model.num_kv_heads, model.head_dim
      numba_cpu.register(*sizes, config.scheduler.cache.page_size, cache_dir)


def _refusal(
  name: Implementation, target: Target, model: ModelConfig, page_size: int, dtype: str
) -> str | None:
  """Why an implementation cannot be used; None if it can."""
  reason = unsupported(
    name,
    platform=target.platform,
    compute_capability=target.compute_capability,
    head_dim=model.head_dim,
    group=model.num_heads // model.num_kv_heads,
    page_size=page_size,
    dtype=dtype,
  )
  if reason is None and name == "mosaic_gpu" and target.num_sms is None:
    return f"{target.kind} does not tell how many multiprocessors it has"
  if reason is None and name == "numba":
    try:
      importlib.import_module(IMPLEMENTATIONS[name])
    except ImportError as error:  # such as a numpy that is too new for it
      return f"numba cannot be imported: {error}"
  return reason


def _require(name: str, refusal: str | None) -> None:
  if refusal is not None:
    raise NotImplementedError(
      f"attention={name!r}: {refusal}; use 'auto' or 'xla' on this device and model"
    )
