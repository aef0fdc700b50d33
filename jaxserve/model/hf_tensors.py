"""Names of Hugging Face tensors, and ours of them: arrays fused from files, read one by one."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.config import MATRICES, ModelConfig
from jaxserve.model.checkpoint import Dtype, array_dtype
from jaxserve.model.hf_config import Family
from jaxserve.model.lazy_params import LazyParams, aligned_empty
from jaxserve.model.llama import FLOAT32, NORMS, param_shapes
from jaxserve.model.shards import Tensor, check_dtype, is_quantized, numpy_dtype, read_into

_TOP_LEVEL = {
  "embed": "model.embed_tokens.weight",
  "norm": "model.norm.weight",
  "lm_head": "lm_head.weight",
}
_NORMS = {
  "input_norm": "input_layernorm",
  "post_norm": "post_attention_layernorm",
  "q_norm": "self_attn.q_norm",
  "k_norm": "self_attn.k_norm",
}
# Our matrix -> the modules stacked into it, in row order; and what files with fused ones call it.
_PARTS: Mapping[str, tuple[str, ...]] = {
  "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
  "o": ("self_attn.o_proj",),
  "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
  "down": ("mlp.down_proj",),
}
_FUSED = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
_NUM_NAMES = 4


def _module_names(ours: str, present: Mapping[str, Tensor], prefix: str) -> Sequence[str]:
  """The modules of one of our matrices or its bias, as this file has them."""
  fused = _FUSED.get(ours)
  if fused is not None and f"{prefix}.{fused}.weight" in present:
    return (fused,)
  return _PARTS[ours]


def tensor_names(config: ModelConfig, present: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
  """Our flat names -> the Hugging Face tensors stacked into each, whether or not they are there."""
  names: dict[str, tuple[str, ...]] = {}
  for ours in param_shapes(config):
    if ours in _TOP_LEVEL:
      names[ours] = (_TOP_LEVEL[ours],)
      continue
    _, layer, leaf = ours.split(".")
    prefix = f"model.layers.{layer}"
    if leaf in _NORMS:
      names[ours] = (f"{prefix}.{_NORMS[leaf]}.weight",)
    else:
      kind = "weight" if leaf in MATRICES else "bias"
      modules = _module_names(leaf.removesuffix("_bias"), present, prefix)
      names[ours] = tuple(f"{prefix}.{module}.{kind}" for module in modules)
  return names


def _part_shapes(
  config: ModelConfig, leaf: str, shape: tuple[int, ...], parts: int
) -> list[tuple[int, ...]]:
  """The shapes of the parts stacked into an array."""
  if parts == 1:
    return [shape]
  q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
  is_qkv = leaf.removesuffix("_bias") == "qkv"
  rows = (q, kv, kv) if is_qkv else (config.intermediate_size,) * 2
  return [(count, *shape[1:]) for count in rows]


def _check(
  config: ModelConfig, names: Mapping[str, Sequence[str]], present: Mapping[str, Tensor]
) -> None:
  """Raises a ValueError that names a tensor which is missing, unknown, or of a wrong kind."""
  known = {name for parts in names.values() for name in parts}
  if config.tie_word_embeddings:
    known.add(_TOP_LEVEL["lm_head"])  # Some files repeat the embedding under this name.
  unknown = [n for n in present if n not in known and not n.endswith(_IGNORED_SUFFIXES)]
  for name in filter(lambda name: is_quantized(present[name]), unknown):
    check_dtype(name, present[name])
  if unknown:
    some = ", ".join(sorted(unknown)[:_NUM_NAMES])
    raise ValueError(f"{len(unknown)} tensors that this model does not have: {some}")
  for ours, shape in param_shapes(config).items():
    parts = names[ours]
    shapes = _part_shapes(config, ours.rsplit(".", 1)[-1], shape, len(parts))
    for name, expected in zip(parts, shapes, strict=True):
      if name not in present:
        raise ValueError(f"tensor {name!r} is missing")
      check_dtype(name, present[name])
      if present[name].shape != expected:
        raise ValueError(
          f"tensor {name!r} has shape {present[name].shape}, but config.json makes it {expected}"
        )


def fused_params(
  config: ModelConfig, family: Family, present: Mapping[str, Tensor], dtype: Dtype | None
) -> LazyParams:
  """Our parameters, each read from its tensors when it is asked for.

  Args:
    config: the model's shape.
    family: whose conventions the tensors follow.
    present: tensors by their Hugging Face names.
    dtype: of the matrices returned; gains and biases are float32. None: as the file has it.

  Raises:
    ValueError: naming the tensor that is missing, unknown, or has a wrong shape or dtype.
  """
  names = tensor_names(config, present)
  _check(config, names, present)
  shapes = param_shapes(config)

  def read(ours: str) -> np.ndarray:
    parts = [present[name] for name in names[ours]]
    leaf = ours.rsplit(".", 1)[-1]
    as_stored = dtype is None and leaf not in FLOAT32
    target = numpy_dtype(parts[0].dtype) if as_stored else array_dtype(ours, dtype or "float32")
    array = aligned_empty(shapes[ours], target)
    row = 0
    for part in parts:
      read_into(part, array[row : row + part.shape[0]])
      row += part.shape[0]
    if family.one_plus_gain and leaf in NORMS:
      array += 1
    return array

  used = {name for parts in names.values() for name in parts}
  total = sum(present[name].stop - present[name].start for name in used)
  return LazyParams(shapes, read, total)
