"""Models as Hugging Face lays them out: config.json, *.safetensors, tokenizer.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from jaxserve.model import hf_config, hf_rope, shards
from jaxserve.model.checkpoint import Checkpoint, Dtype
from jaxserve.model.hf_tensors import fused_params

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_QUANT_CONFIG = "hf_quant_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_ADVICE = (
  "loading them runs code from the file; get the model's *.safetensors, or convert with "
  "transformers: from_pretrained(...).save_pretrained(..., safe_serialization=True)"
)
# Marks that end a turn in published chat templates; some files list them nowhere as an end.
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
_MAX_JSON_BYTES = 256 << 20
_NUM_NAMES = 4


def _read_json(path: Path) -> dict[str, Any]:
  shards.refuse_lfs_pointer(path)
  if path.stat().st_size > _MAX_JSON_BYTES:
    raise ValueError(f"{path} has {path.stat().st_size} bytes, which no such file has")
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not JSON: {error}") from None
  if not isinstance(value, dict):
    raise ValueError(f"{path} is not a JSON object")
  return value


def _read_optional_json(path: Path) -> dict[str, Any]:
  return _read_json(path) if path.is_file() else {}


def _indexed(directory: Path) -> dict[str, str]:
  """Tensor -> file name, as the index has it; a ValueError names the files that are missing."""
  weight_map = _read_json(directory / _INDEX).get("weight_map")
  if not isinstance(weight_map, Mapping) or not weight_map:
    raise ValueError(f"{directory / _INDEX}: weight_map={weight_map!r} must name the shards")
  for name in set(weight_map.values()) if all(map(_is_text, weight_map.values())) else [None]:
    shards.inside(directory, name)
  names = sorted(set(weight_map.values()))
  if missing := [name for name in names if not (directory / name).is_file()]:
    raise ValueError(
      f"{directory}: {len(missing)} of its {len(names)} shards are missing: "
      f"{', '.join(missing[:_NUM_NAMES])}; download them too"
    )
  return dict(weight_map)


def _is_text(value: object) -> bool:
  return isinstance(value, str)


def _refuse_pickles(directory: Path) -> None:
  found = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
  if found:
    raise ValueError(
      f"{directory}: its weights are pickles ({', '.join(found[:_NUM_NAMES])}), which are not "
      f"read: {_ADVICE}"
    )


def _tensors(directory: Path) -> dict[str, shards.Tensor]:
  """All tensors: of the shards that the index names, or of every *.safetensors without one."""
  if (directory / _INDEX).is_file():
    weight_map = _indexed(directory)
    files = sorted(set(weight_map.values()))
    found = shards.read_headers([directory / name for name in files])
    for name, file in weight_map.items():
      if name not in found or found[name].path.name != Path(file).name:
        raise ValueError(f"{directory / file}: tensor {name!r}, which the index puts there, is not")
    return found
  single = directory / _SINGLE
  paths = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
  if not paths:
    _refuse_pickles(directory)
    raise ValueError(f"{directory}: there are no *.safetensors files in it")
  return shards.read_headers([shards.inside(directory, path.name) for path in paths])


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
  """chat_template.jinja wins over tokenizer_config.json, where it may be one of several."""
  path = directory / "chat_template.jinja"
  if path.is_file():
    shards.refuse_lfs_pointer(path)
    return path.read_text(encoding="utf-8")
  template = tokenizer_config.get("chat_template")
  if isinstance(template, list):
    named = {entry.get("name"): entry.get("template") for entry in template}
    template = named.get("default")
  return template if isinstance(template, str) else None


def _tokenizer_json(directory: Path) -> str:
  path, model = directory / "tokenizer.json", directory / "tokenizer.model"
  if path.is_file():
    shards.refuse_lfs_pointer(path)
    return path.read_text(encoding="utf-8")
  if model.is_file():
    shards.refuse_lfs_pointer(model)
    from jaxserve.model.sentencepiece_tokenizer import tokenizer_json

    return tokenizer_json(model)
  raise ValueError(
    f"{directory}: it has no tokenizer.json and no tokenizer.model; other tokenizers are not "
    "supported"
  )


def _text(token: object) -> object:
  """A token in tokenizer_config.json: its text, or an object that has it as "content"."""
  return token.get("content") if isinstance(token, Mapping) else token


def _ends_of_reply(
  tokenizer_json: str, tokenizer_config: Mapping[str, Any], chat_template: str | None
) -> list[int]:
  """Ids of the tokenizer's own end, and of the marks that end a turn of this chat template."""
  try:
    added = json.loads(tokenizer_json).get("added_tokens") or []
    ids = {token["content"]: int(token["id"]) for token in added}
  except (ValueError, KeyError, TypeError, AttributeError):  # The reader of the tokenizer says why.
    return []
  marks = [mark for mark in _ENDS_OF_TURN if mark in (chat_template or "")]
  wanted = [_text(tokenizer_config.get("eos_token")), *marks]
  return [ids[token] for token in wanted if isinstance(token, str) and token in ids]


def _check_quantization(directory: Path, config: Mapping[str, Any]) -> None:
  """Some files keep what the weights are beside config.json, which then says nothing of it."""
  hf_config.refuse_quantized(config)
  hf_config.refuse_quantized(_read_optional_json(directory / _QUANT_CONFIG), _QUANT_CONFIG)


def is_hf_directory(directory: Path) -> bool:
  """Whether `directory` has a config.json."""
  return (directory / "config.json").is_file()


def read_hf_directory(directory: Path, dtype: Dtype | None) -> Checkpoint:
  """Opens a model of the Llama family in a Hugging Face directory.

  Args:
    directory: with config.json, *.safetensors and tokenizer.json or tokenizer.model.
    dtype: of the matrices; gains and biases are float32. None: as the files have them.

  Returns:
    The checkpoint. Headers have been checked, the arrays are read when asked for.

  Raises:
    ValueError: naming the file or tensor and what is wrong with it or missing.
  """
  raw = _read_json(directory / "config.json")
  generation = _read_optional_json(directory / "generation_config.json")
  tokenizer_config = _read_optional_json(directory / "tokenizer_config.json")
  try:
    family = hf_config.family_of(raw)
    _check_quantization(directory, raw)
    config = hf_config.model_config_from_hf(raw)
    params = fused_params(config, family, _tensors(directory), dtype)
  except ValueError as error:
    named = str(error) if str(directory) in str(error) else f"{directory}: {error}"
    raise ValueError(named) from None
  for warning in hf_rope.rope_warnings(raw):
    logging.warning("%s: %s", directory, warning)
  tokenizer, template = _tokenizer_json(directory), _chat_template(directory, tokenizer_config)
  ends = [*hf_config.eos_token_ids(raw, generation)]
  ends += _ends_of_reply(tokenizer, tokenizer_config, template)
  bos = raw.get("bos_token_id")
  return Checkpoint(
    config=config,
    params=params,
    tokenizer_json=tokenizer,
    chat_template=template,
    eos_token_ids=tuple(dict.fromkeys(ends)),
    bos_token_id=bos if isinstance(bos, int) else None,
    name=directory.resolve().name,
    source=str(directory),
  )
