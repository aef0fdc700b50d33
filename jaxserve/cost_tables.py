"""Models and devices by name, for `jaxserve.cost`.

Models are counted from the numbers of their published `config.json`; P is every parameter,
embedding and head included. Devices have the dense bfloat16 figures of their data sheet; what they
achieve is cited or estimated, and `Device.achieved` says which.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.cost import H100, LLAMA3_8B, Hardware, ModelCost

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
# Keys of a config.json under which a token is not multiplied with all weights, or does not attend
# to all keys before it: the formulas of `jaxserve.cost` would be wrong.
_OTHER_SHAPES = (
  "num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "text_config",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
  """A device of the table.

  Attributes:
    hardware: its figures.
    memory: bytes of memory that the data sheet names.
    kinds: names under which JAX reports exactly this device (`jax.Device.device_kind`).
    achieved: where `hardware.flops` and `hardware.bandwidth` come from.
  """

  hardware: Hardware
  memory: float
  kinds: tuple[str, ...]
  achieved: str


def _dense(
  vocab: int,
  hidden: int,
  inner: int,
  layers: int,
  heads: int,
  kv_heads: int,
  head_dim: int,
  *,
  tied: bool = False,
  per_layer: int = 0,
  bytes_per_param: float = 2,
  kv_bytes: float = 2,
) -> ModelCost:
  """A dense decoder with SwiGLU and RMSNorm; `per_layer` counts biases and further norms."""
  q, kv = heads * head_dim, kv_heads * head_dim
  layer = hidden * (2 * q + 2 * kv + 3 * inner + 2) + per_layer
  return ModelCost(
    num_params=vocab * hidden * (1 if tied else 2) + layers * layer + hidden,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    bytes_per_param=bytes_per_param,
    kv_bytes=kv_bytes,
  )


MODELS: Mapping[str, ModelCost] = {
  "smollm2-135m": _dense(49152, 576, 1536, 30, 9, 3, 64, tied=True),
  "smollm2-360m": _dense(49152, 960, 2560, 32, 15, 5, 64, tied=True),
  "tinyllama-1.1b": _dense(32000, 2048, 5632, 22, 32, 4, 64),
  "llama3.2-1b": _dense(128256, 2048, 8192, 16, 32, 8, 64, tied=True),
  "llama3.2-3b": _dense(128256, 3072, 8192, 28, 24, 8, 128, tied=True),
  "llama2-7b": _dense(32000, 4096, 11008, 32, 32, 32, 128),
  # Version 0.2, which has no sliding window; version 0.1 has one, of 4,096 tokens.
  "mistral-7b": _dense(32000, 4096, 14336, 32, 32, 8, 128),
  # Biases of the query, key and value projections.
  "qwen2.5-7b": _dense(152064, 3584, 18944, 28, 28, 4, 128, per_layer=(28 + 2 * 4) * 128),
  "llama3-8b": LLAMA3_8B,
  # Norms of queries and keys, of one head's width each.
  "qwen3-8b": _dense(151936, 4096, 12288, 36, 32, 8, 128, per_layer=2 * 128),
  "mistral-nemo-12b": _dense(131072, 5120, 14336, 40, 32, 8, 128),
  "qwen3-14b": _dense(151936, 5120, 17408, 40, 40, 8, 128, per_layer=2 * 128),
  "qwen3-32b": _dense(151936, 5120, 25600, 64, 64, 8, 128, per_layer=2 * 128),
  "llama3-70b": _dense(128256, 8192, 28672, 80, 64, 8, 128),
}
"""Models by name, in bfloat16: weights and KV of 2 bytes. Llama 3 also stands for Llama 3.1."""

_FLOPS_SHARE = H100.flops / H100.spec_flops
_BANDWIDTH_SHARE = H100.bandwidth / H100.spec_bandwidth
_ESTIMATED = (
  f"not measured: the H100's shares of the data sheet, {_FLOPS_SHARE:.0%} of the FLOP/s and "
  f"{_BANDWIDTH_SHARE:.0%} of the bandwidth"
)


def _estimated(name: str, spec_flops: float, spec_bandwidth: float) -> Hardware:
  return Hardware(
    name=name,
    flops=_FLOPS_SHARE * spec_flops,
    bandwidth=_BANDWIDTH_SHARE * spec_bandwidth,
    spec_flops=spec_flops,
    spec_bandwidth=spec_bandwidth,
  )


DEVICES: Mapping[str, Device] = {
  "h100": Device(
    hardware=H100,
    memory=80e9,
    kinds=("NVIDIA H100 80GB HBM3",),
    achieved="the reference case of jaxserve.cost: round figures that large kernels reach, "
    "not measured here",
  ),
  "h200": Device(
    hardware=_estimated("H200 SXM", 989e12, 4.8e12),
    memory=141e9,
    kinds=("NVIDIA H200",),
    achieved=_ESTIMATED,
  ),
  "a100": Device(
    hardware=_estimated("A100 SXM 80GB", 312e12, 2.039e12),
    memory=80e9,
    kinds=("NVIDIA A100-SXM4-80GB",),
    achieved=_ESTIMATED,
  ),
  "l40s": Device(
    hardware=_estimated("L40S", 362e12, 0.864e12),
    memory=48e9,
    kinds=("NVIDIA L40S",),
    achieved=_ESTIMATED,
  ),
  "b200": Device(
    hardware=_estimated("B200 SXM", 2.25e15, 8e12),
    memory=180e9,
    kinds=("NVIDIA B200",),
    achieved=_ESTIMATED,
  ),
}
"""Devices by name: figures of one device, dense bfloat16, by the vendor's data sheets."""


def find_model(name: str) -> ModelCost:
  """A model of the table.

  Raises:
    ValueError: the table has no such name; the message lists what it has.
  """
  if name not in MODELS:
    raise ValueError(
      f"model={name!r}: not in the table; use one of {', '.join(MODELS)}, or the path of a "
      "config.json"
    )
  return MODELS[name]


def find_device(name: str) -> Device:
  """A device of the table.

  Raises:
    ValueError: the table has no such name; the message lists what it has.
  """
  if name not in DEVICES:
    raise ValueError(f"hardware={name!r}: not in the table; use one of {', '.join(DEVICES)}")
  return DEVICES[name]


def device_of_kind(kind: str) -> Device | None:
  """The device that JAX reports under this name, or None. Close variants (PCIe, NVL) are None."""
  return next((device for device in DEVICES.values() if kind in device.kinds), None)


def model_of_config(
  config: Mapping[str, Any], bytes_per_param: float | None = None, kv_bytes: float = 2
) -> ModelCost:
  """Counts the model of a Hugging Face `config.json`: a dense decoder of the Llama family.

  Args:
    config: the parsed file.
    bytes_per_param: b; None for 2, which a quantized checkpoint must say otherwise.
    kv_bytes: bytes of one element of the KV cache.

  Returns:
    what the arithmetic needs to know.

  Raises:
    ValueError: a key is missing or wrong, or the model is not one that the formulas describe.
  """
  kind = config.get("model_type")
  if kind not in _DENSE:
    raise ValueError(f"config.json: model_type={kind!r}: use a model of {', '.join(_DENSE)}")
  for key in _OTHER_SHAPES:
    if config.get(key):
      raise ValueError(f"config.json: {key}={config[key]!r}: only dense decoders are counted")
  window = config.get("sliding_window")
  if window is not None and config.get("use_sliding_window", True):
    raise ValueError(f"config.json: sliding_window={window!r}: only full attention is counted")
  if bytes_per_param is None and config.get("quantization_config"):
    raise ValueError(
      "config.json: quantization_config is given: say how many bytes a weight takes, "
      "for example bytes_per_param=1"
    )
  hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
  kv_heads = _whole(config, "num_key_value_heads", heads)
  head_dim = _whole(config, "head_dim", hidden // heads)
  return _dense(
    _whole(config, "vocab_size"),
    hidden,
    _whole(config, "intermediate_size"),
    _whole(config, "num_hidden_layers"),
    heads,
    kv_heads,
    head_dim,
    tied=bool(config.get("tie_word_embeddings", False)),
    per_layer=_biases_and_norms(config, hidden, (heads + 2 * kv_heads) * head_dim, head_dim),
    bytes_per_param=2 if bytes_per_param is None else bytes_per_param,
    kv_bytes=kv_bytes,
  )


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
  value = config.get(key)
  if value is None:
    value = default
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise ValueError(f"config.json: {key}={value!r}: a whole number of at least 1 is needed")
  return value


def _biases_and_norms(config: Mapping[str, Any], hidden: int, qkv: int, head_dim: int) -> int:
  kind = config["model_type"]
  biases = qkv if kind == "qwen2" else (qkv + hidden) * bool(config.get("attention_bias"))
  return biases + 2 * head_dim * (kind == "qwen3")
