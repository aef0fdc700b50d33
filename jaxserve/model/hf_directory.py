"""Llama checkpoints as Hugging Face lays them out: config.json, *.safetensors, tokenizer.json."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.model import hf_config
from jaxserve.model.checkpoint import Checkpoint, Dtype, array_dtype, check_params
from jaxserve.progress import progress

_INDEX = "model.safetensors.index.json"
_LFS_MAGIC = b"version https://git-lfs"
_TOP_LEVEL = {
  "embed": "model.embed_tokens.weight",
  "norm": "model.norm.weight",
  "lm_head": "lm_head.weight",
}
# Our name -> the tensors stacked into it, in row order.
_PER_LAYER: Mapping[str, tuple[str, ...]] = {
  "input_norm": ("input_layernorm",),
  "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
  "o": ("self_attn.o_proj",),
  "post_norm": ("post_attention_layernorm",),
  "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
  "down": ("mlp.down_proj",),
}
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def _refuse_lfs_pointer(path: Path) -> None:
  with path.open("rb") as file:
    if file.read(len(_LFS_MAGIC)) == _LFS_MAGIC:
      raise ValueError(f"{path} is a git-LFS pointer, not the file itself; run `git lfs pull`")


def _read_json(path: Path) -> dict[str, Any]:
  _refuse_lfs_pointer(path)
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is not JSON: {error}") from None
  if not isinstance(value, dict):
    raise ValueError(f"{path} is not a JSON object")
  return value


def _read_optional_json(path: Path) -> dict[str, Any]:
  return _read_json(path) if path.is_file() else {}


def _weight_files(directory: Path) -> list[Path]:
  """The shards: those that the index names, or every *.safetensors where there is no index."""
  if (directory / _INDEX).is_file():
    names = sorted(set(_read_json(directory / _INDEX).get("weight_map", {}).values()))
    paths = [directory / name for name in names]
    if missing := [path.name for path in paths if not path.is_file()]:
      raise ValueError(f"{directory}: {len(missing)} of its shards are missing: {missing[:4]}")
  else:
    paths = sorted(directory.glob("*.safetensors"))
  if not paths:
    raise ValueError(f"{directory}: there are no *.safetensors files in it")
  for path in paths:
    _refuse_lfs_pointer(path)
  return paths


def tensor_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
  """Our flat names -> the Hugging Face tensors stacked into each."""
  names = {
    f"layers.{layer}.{ours}": tuple(f"model.layers.{layer}.{part}.weight" for part in parts)
    for layer in range(config.num_layers)
    for ours, parts in _PER_LAYER.items()
  }
  names |= {ours: (theirs,) for ours, theirs in _TOP_LEVEL.items()}
  if config.tie_word_embeddings:
    del names["lm_head"]
  return names


def fuse(
  config: ModelConfig, get: Callable[[str], np.ndarray], dtype: Dtype
) -> dict[str, np.ndarray]:
  """Renames and stacks Hugging Face tensors.

  Args:
    config: the model's shape.
    get: the tensor of a Hugging Face name; raises a ValueError where there is none.
    dtype: of the matrices returned; norm gains are float32.

  Returns:
    Arrays by flat name, as `llama.param_shapes` lists them.
  """
  names = tensor_names(config)
  params: dict[str, np.ndarray] = {}
  with progress(len(names), "arrays", "Weights") as bar:
    for ours, parts in names.items():
      arrays = [get(part) for part in parts]
      array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
      params[ours] = np.asarray(array).astype(array_dtype(ours, dtype), copy=False)
      bar.advance()
  return params


def _open_shards(paths: list[Path]) -> dict[str, Any]:
  from safetensors import safe_open

  shard_of: dict[str, Any] = {}
  for path in paths:
    try:
      shard = safe_open(path, "numpy")
    except Exception as error:  # SafetensorError; it derives from Exception alone.
      raise ValueError(f"{path} is truncated or corrupt ({error}); get it again") from None
    shard_of |= dict.fromkeys(shard.keys(), shard)
  return shard_of


def _read_params(directory: Path, config: ModelConfig, dtype: Dtype) -> dict[str, np.ndarray]:
  shard_of = _open_shards(_weight_files(directory))
  known = {name for parts in tensor_names(config).values() for name in parts}
  if config.tie_word_embeddings:
    known.add(_TOP_LEVEL["lm_head"])  # Some files repeat the embedding under this name.
  extra = sorted(
    name for name in shard_of if name not in known and not name.endswith(_IGNORED_SUFFIXES)
  )
  if extra:
    raise ValueError(f"{len(extra)} tensors that a Llama does not have: {', '.join(extra[:4])}")

  def get(name: str) -> np.ndarray:
    if name not in shard_of:
      raise ValueError(f"tensor {name!r} is missing")
    return shard_of[name].get_tensor(name)

  params = fuse(config, get, dtype)
  check_params(config, params)
  return params


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
  """chat_template.jinja wins over tokenizer_config.json, where it may be one of several."""
  path = directory / "chat_template.jinja"
  if path.is_file():
    return path.read_text(encoding="utf-8")
  template = tokenizer_config.get("chat_template")
  if isinstance(template, list):
    named = {entry.get("name"): entry.get("template") for entry in template}
    return named.get("default")
  return template


def _tokenizer_json(directory: Path) -> str:
  path = directory / "tokenizer.json"
  if not path.is_file():
    raise ValueError(f"{directory}: tokenizer.json is missing; other tokenizers are not supported")
  _refuse_lfs_pointer(path)
  return path.read_text(encoding="utf-8")


def is_hf_directory(directory: Path) -> bool:
  """Whether `directory` has a config.json."""
  return (directory / "config.json").is_file()


def read_hf_directory(directory: Path, dtype: Dtype) -> Checkpoint:
  """Reads a Llama from a Hugging Face directory.

  Args:
    directory: with config.json, *.safetensors and tokenizer.json.
    dtype: of the matrices returned; norm gains are float32.

  Returns:
    The checkpoint.

  Raises:
    ValueError: naming the file and what is wrong with it or missing.
  """
  raw = _read_json(directory / "config.json")
  generation = _read_optional_json(directory / "generation_config.json")
  tokenizer_config = _read_optional_json(directory / "tokenizer_config.json")
  try:
    config = hf_config.model_config_from_hf(raw)
    params = _read_params(directory, config, dtype)
  except ValueError as error:
    raise ValueError(f"{directory}: {error}") from None
  bos = raw.get("bos_token_id")
  return Checkpoint(
    config=config,
    params=params,
    tokenizer_json=_tokenizer_json(directory),
    chat_template=_chat_template(directory, tokenizer_config),
    eos_token_ids=hf_config.eos_token_ids(raw, generation),
    bos_token_id=bos if isinstance(bos, int) else None,
    name=directory.resolve().name,
    source=str(directory),
  )
