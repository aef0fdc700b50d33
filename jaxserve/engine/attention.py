"""Which implementation of attention an engine runs, decided once, and what its plans must hold."""

import dataclasses

import jax
from absl import logging

from jaxserve.config import ModelConfig, SplitKV, TargetDescription
from jaxserve.engine.config import Attention, EngineConfig
from pallas_kernels.ragged_paged_attention import Implementation, unsupported

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
    wanted: "auto": mosaic_gpu on a GPU that it supports, else xla; otherwise what it names.
    target: device of the model.
    model: what is served.
    page_size: tokens of a KV page.
    dtype: of pages.

  Raises:
    NotImplementedError: mosaic_gpu is wanted and not supported; with the reason.
  """
  if wanted in ("xla", "ref"):
    logging.info("attention: %s (as asked for)", wanted)
    return Choice(implementation=wanted)
  reason = _refusal(target, model, page_size, dtype)
  if wanted == "mosaic_gpu":
    _require(reason)
  if reason is not None or target.num_sms is None:
    level = logging.INFO if target.platform == "cpu" else logging.WARNING
    logging.log(level, "attention: xla (%s)", reason)
    return Choice(implementation="xla")
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
  if config.attention == "mosaic_gpu" and config.splits is not None:
    _require(_refusal(target, config.model, page_size, config.page_dtype))
    return config
  return choose(config.attention, target, config.model, page_size, config.page_dtype).applied(
    config
  )


def _refusal(target: Target, model: ModelConfig, page_size: int, dtype: str) -> str | None:
  """Why mosaic_gpu cannot be used; None if it can."""
  reason = unsupported(
    "mosaic_gpu",
    platform=target.platform,
    compute_capability=target.compute_capability,
    head_dim=model.head_dim,
    group=model.num_heads // model.num_kv_heads,
    page_size=page_size,
    dtype=dtype,
  )
  if reason is None and target.num_sms is None:
    return f"{target.kind} does not tell how many multiprocessors it has"
  return reason


def _require(refusal: str | None) -> None:
  if refusal is not None:
    raise NotImplementedError(
      f"attention='mosaic_gpu': {refusal}; use 'auto' or 'xla' on this device and model"
    )
