"""Llama models in GGUF files: dequantized to float32, and put into our names and row order.

`read_gguf` is the whole interface: metadata -> ModelConfig, tokenizer (see `gguf_tokenizer`), and
arrays that are dequantized when they are asked for. GGUF stores the rows of q and k permuted, so
that neighbouring rows form the pairs that RoPE rotates; we pair row i with row i + D/2, hence
`unpermute`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.model import gguf_tokenizer
from jaxserve.model.checkpoint import Checkpoint
from jaxserve.model.lazy_params import LazyParams, aligned_empty
from jaxserve.model.llama import param_shapes

_ARCHITECTURE = "llama"
_ROPE_FREQS = "rope_freqs.weight"
_IGNORED_TENSORS = (_ROPE_FREQS,)
_TOP_LEVEL = {
  "token_embd.weight": "embed",
  "output_norm.weight": "norm",
  "output.weight": "lm_head",
}
_PER_LAYER = {
  "attn_norm.weight": "input_norm",
  "attn_output.weight": "o",
  "ffn_norm.weight": "post_norm",
  "ffn_down.weight": "down",
}
# Fused arrays: our name -> the tensors stacked into it, in row order.
_FUSED = {
  "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
  "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
}
# Every published Llama 3.1 / 3.2 has these; a GGUF keeps only the factors that follow from them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
  """Puts the rows of a GGUF q or k weight into half-split RoPE order.

  Args:
    weight: f32[num_heads * D, in]; rows 2i and 2i + 1 of a head are rotated together.
    num_heads: heads in `weight`.

  Returns:
    f32[num_heads * D, in]; rows i and i + D/2 of a head are rotated together.
  """
  rows, columns = weight.shape
  half = rows // num_heads // 2
  return weight.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _reader_class() -> type:
  from gguf import GGUFReader

  class CheckedReader(GGUFReader):
    """A GGUFReader that says where a file ends too early, and in which tensor."""

    def _get(
      self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None
    ) -> np.ndarray:
      if isinstance(self.data, np.memmap):  # Slicing one is ten times slower than a plain array.
        vars(self)["data"] = self.data.view(np.ndarray)
      order = self.byte_order if override_order is None else override_order
      dtype = np.dtype(dtype)
      end = int(offset) + dtype.itemsize * int(count)
      if end > self.data.size:
        raise ValueError(f"it ends at byte {self.data.size}, but byte {end} is needed")
      array = self.data[int(offset) : end].view(dtype)
      return array.view(dtype.newbyteorder(order))

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
      tensors: dict[str, Any] = {}
      for field in fields:
        name = bytes(field.parts[1]).decode("utf-8", "replace")
        if name in tensors:
          raise ValueError(f"tensor {name!r} is there twice")
        try:
          super()._build_tensors(start_offs, [field])
        except ValueError as error:
          raise ValueError(f"tensor {name!r}: {error}") from None
        tensors[name] = self.tensors[0]
      self.tensors = list(tensors.values())

  return CheckedReader


def _open(path: Path) -> Any:
  try:
    return _reader_class()(path)
  except OSError as error:
    raise ValueError(f"{path}: {error.strerror or error}") from None
  except Exception as error:  # Whatever garbage makes the reader trip over.
    raise ValueError(
      f"{path} is not a complete GGUF file: {error}; it is truncated or corrupt, get it again"
    ) from None


class _Fields(Mapping[str, Any]):
  """The metadata of a GGUF, decoded on access."""

  def __init__(self, reader: Any):
    self._fields = reader.fields

  def __getitem__(self, key: str) -> Any:
    return self._fields[key].contents()

  def __contains__(self, key: object) -> bool:
    return key in self._fields

  def __iter__(self) -> Iterator[str]:
    return iter(self._fields)

  def __len__(self) -> int:
    return len(self._fields)


def _shortest_float32(value: float) -> float:
  """The shortest decimal that is this float32: 1e-5, not 9.999999747378752e-06."""
  return float(str(np.float32(value)))


def llama3_rope(theta: float, head_dim: int, factors: np.ndarray) -> RopeConfig:
  """The llama3 scaling that divides the RoPE frequencies by `factors`.

  Args:
    theta: base of the frequencies.
    head_dim: D.
    factors: f32[D/2] of a GGUF's `rope_freqs.weight`.

  Returns:
    The scaling.

  Raises:
    ValueError: if no llama3 scaling with the published constants gives these factors.
  """
  wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  factor = float(np.max(factors))
  smooth = (_LLAMA3_ORIGINAL / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
  smooth = np.clip(smooth, 0.0, 1.0)
  expected = 1.0 / ((1.0 - smooth) / factor + smooth)
  if expected.shape != factors.shape or not np.allclose(expected, factors, rtol=1e-4):
    raise ValueError("its RoPE factors are not those of Llama 3.1; use the safetensors checkpoint")
  return RopeConfig(
    theta=theta,
    kind="llama3",
    factor=_shortest_float32(factor),
    low_freq_factor=_LLAMA3_LOW,
    high_freq_factor=_LLAMA3_HIGH,
    original_max_position=_LLAMA3_ORIGINAL,
  )


def _rope(fields: Mapping[str, Any], head_dim: int, tensors: Mapping[str, Any]) -> RopeConfig:
  scaling = fields.get("llama.rope.scaling.type", "none")
  if scaling not in ("none", "linear"):
    raise ValueError(
      f"llama.rope.scaling.type={scaling!r} is not supported; only 'none' and 'linear' are"
    )
  rotated = fields.get("llama.rope.dimension_count", head_dim)
  if rotated != head_dim:
    raise ValueError(f"llama.rope.dimension_count={rotated} is not supported; only {head_dim} is")
  theta = float(_shortest_float32(fields.get("llama.rope.freq_base", 10_000.0)))
  if scaling == "linear":
    factor = _shortest_float32(fields.get("llama.rope.scaling.factor", 1.0))
    return RopeConfig(theta=theta, kind="linear", factor=factor)
  if _ROPE_FREQS not in tensors:
    return RopeConfig(theta=theta)
  return llama3_rope(theta, head_dim, np.asarray(tensors[_ROPE_FREQS].data, dtype=np.float32))


def model_config(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
  """The model's shape.

  Args:
    fields: the GGUF's metadata.
    tensors: its tensors by name.

  Returns:
    The shape.

  Raises:
    ValueError: if the model is no plain Llama, or a field is missing.
  """
  architecture = fields.get("general.architecture")
  if architecture != _ARCHITECTURE:
    raise ValueError(f"general.architecture={architecture!r} is not supported; only 'llama' is")
  if fields.get("llama.expert_count", 0):
    raise ValueError("llama.expert_count: mixtures of experts are not supported")
  needed = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
  if missing := [f"llama.{key}" for key in needed if f"llama.{key}" not in fields]:
    raise ValueError(f"its metadata lacks {', '.join(missing)}")
  if "token_embd.weight" not in tensors:
    raise ValueError("tensor 'token_embd.weight' is missing")
  layers, hidden, inner, heads = (fields[f"llama.{key}"] for key in needed)
  kv_heads = fields.get("llama.attention.head_count_kv", heads)
  if not isinstance(heads, int) or not isinstance(kv_heads, int) or not isinstance(inner, int):
    raise ValueError("shapes that differ from layer to layer are not supported")
  head_dim = fields.get("llama.attention.key_length", hidden // max(heads, 1))
  return ModelConfig(
    vocab_size=int(tensors["token_embd.weight"].shape[1]),
    hidden_size=hidden,
    intermediate_size=inner,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    rope=_rope(fields, head_dim, tensors),
    rms_norm_eps=_shortest_float32(fields.get("llama.attention.layer_norm_rms_epsilon", 1e-5)),
    tie_word_embeddings="output.weight" not in tensors,
    max_position=fields.get("llama.context_length", 8192),
    sliding_window=fields.get("llama.attention.sliding_window") or None,
  )


def _dequantize(tensor: Any) -> np.ndarray:
  from gguf.quants import dequantize

  return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _check_kind(tensor: Any) -> None:
  from gguf.quants import dequantize

  try:
    dequantize(tensor.data[:1], tensor.tensor_type)
  except NotImplementedError:
    kind = tensor.tensor_type.name
    raise ValueError(
      f"tensor {tensor.name!r}: quantization {kind} is not supported; use Q8_0 or F16"
    ) from None


def tensor_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
  """Our flat names -> the GGUF tensors stacked into each."""
  names: dict[str, tuple[str, ...]] = {ours: (theirs,) for theirs, ours in _TOP_LEVEL.items()}
  for layer in range(config.num_layers):
    prefix = f"blk.{layer}"
    for theirs, ours in _PER_LAYER.items():
      names[f"layers.{layer}.{ours}"] = (f"{prefix}.{theirs}",)
    for ours, parts in _FUSED.items():
      names[f"layers.{layer}.{ours}"] = tuple(f"{prefix}.{part}" for part in parts)
  if config.tie_word_embeddings:
    del names["lm_head"]
  return names


def _rows(config: ModelConfig, name: str, shape: tuple[int, ...]) -> int:
  """Rows of a tensor, given the shape of the array that it is a part of."""
  part = name.removesuffix(".weight").rsplit(".", 1)[-1]
  return {
    "attn_q": config.num_heads * config.head_dim,
    "attn_k": config.num_kv_heads * config.head_dim,
    "attn_v": config.num_kv_heads * config.head_dim,
    "ffn_gate": config.intermediate_size,
    "ffn_up": config.intermediate_size,
  }.get(part, shape[0])


def _check_tensors(
  tensors: Mapping[str, Any], names: Mapping[str, tuple[str, ...]], config: ModelConfig
) -> None:
  """Raises a ValueError that names a tensor which is missing, unknown or of a wrong kind."""
  known = {name for parts in names.values() for name in parts}
  if unknown := sorted(set(tensors) - known - set(_IGNORED_TENSORS)):
    raise ValueError(f"{len(unknown)} tensors that a Llama does not have: {', '.join(unknown[:4])}")
  for ours, shape in param_shapes(config).items():
    for name in names[ours]:
      if name not in tensors:
        raise ValueError(f"tensor {name!r} is missing")
      expected = (_rows(config, name, shape), *shape[1:])
      found = tuple(int(size) for size in reversed(tensors[name].shape))
      if found != expected:
        raise ValueError(f"tensor {name!r} has shape {found}, but the metadata make it {expected}")
      _check_kind(tensors[name])


def _lazy_params(tensors: Mapping[str, Any], config: ModelConfig) -> LazyParams:
  names, shapes = tensor_names(config), param_shapes(config)
  _check_tensors(tensors, names, config)

  def part(name: str) -> np.ndarray:
    array = _dequantize(tensors[name])
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
    return array if heads is None else unpermute(array, heads)

  def read(ours: str) -> np.ndarray:
    array = aligned_empty(shapes[ours], np.dtype(np.float32))
    row = 0
    for name in names[ours]:
      rows = _rows(config, name, shapes[ours])
      array[row : row + rows] = part(name)
      row += rows
    return array

  total = sum(int(tensors[name].n_bytes) for parts in names.values() for name in parts)
  return LazyParams(shapes, read, total)


def _eos_token_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
  keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
  return tuple(dict.fromkeys(fields[key] for key in keys if key in fields))


def read_gguf(path: Path) -> Checkpoint:
  """Reads a Llama GGUF.

  Args:
    path: the file.

  Returns:
    The model in float32; quantized weights are dequantized when they are asked for, which does not
    make them more precise.

  Raises:
    ValueError: naming the file, the tensor or field, and the remedy, if the file is truncated or
      corrupt, or holds something that is not supported.
  """
  reader = _open(path)
  fields = _Fields(reader)
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  try:
    config = model_config(fields, tensors)
    return Checkpoint(
      config=config,
      params=_lazy_params(tensors, config),
      tokenizer_json=gguf_tokenizer.tokenizer_json(fields),
      chat_template=fields.get("tokenizer.chat_template"),
      eos_token_ids=_eos_token_ids(fields),
      bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
      name=path.stem,
      source=str(path),
    )
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None
