"""Hugging Face `config.json` of the Llama family, read strictly: what is not supported is an error.

A reader that ignores a key it does not know serves a model that is quietly wrong (a lost RoPE
scaling costs 0.25 nats at 361 tokens), so every key that changes the forward pass is looked at.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.config import ModelConfig, RopeConfig

_ARCHITECTURES = ("LlamaForCausalLM",)
_MODEL_TYPES = ("llama",)
_ROPE_KINDS = ("default", "llama3")
_DEFAULT_THETA = 10_000.0
_DEFAULT_MAX_POSITION = 2048
# Keys that change the forward pass, with the values under which they change nothing.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
  "hidden_act": ("silu",),
  "attention_bias": (False,),
  "mlp_bias": (False,),
  "sliding_window": (),
  "quantization_config": (),
  "partial_rotary_factor": (1, 1.0),
}


def _refuse(what: str, value: object, remedy: str) -> ValueError:
  return ValueError(f"config.json: {what}={value!r} is not supported; {remedy}")


def _check_architecture(config: Mapping[str, Any]) -> None:
  names = config.get("architectures") or ()
  supported = f"use a checkpoint of {', '.join(_ARCHITECTURES)}"
  for name in names:
    if name not in _ARCHITECTURES:
      raise _refuse("architectures", name, supported)
  if not names and config.get("model_type") not in _MODEL_TYPES:
    raise _refuse("model_type", config.get("model_type"), supported)
  for key, neutral in _NEUTRAL_VALUES.items():
    value = config.get(key)
    if value is not None and value not in neutral:
      raise _refuse(key, value, f"only {' or '.join(map(str, (*neutral, 'null')))} is")


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
  value = config.get(key)
  if value is None:
    value = default
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError(f"config.json: {key}={value!r}: a number is needed")
  return value


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
  value = _number(config, key, default)
  if value != int(value):
    raise ValueError(f"config.json: {key}={value!r}: a whole number is needed")
  return int(value)


def _rope_kind(rope: Mapping[str, Any]) -> str:
  kinds = {key: rope[key] for key in ("rope_type", "type") if rope.get(key) is not None}
  if len(set(kinds.values())) > 1:
    named = " and ".join(f"{key}={value!r}" for key, value in kinds.items())
    raise ValueError(
      f"config.json: RoPE has both {named}; keep the one that the model was made for"
    )
  return next(iter(kinds.values()), "default")


def rope_config_from_hf(config: Mapping[str, Any]) -> RopeConfig:
  """Reads RoPE from either spelling.

  Args:
    config: a `config.json`: flat `rope_theta` with `rope_scaling` (transformers 4), or
      `rope_parameters` (transformers 5). A null is read as absent.

  Returns:
    The rotary embedding.

  Raises:
    ValueError: if the scaling is of a kind that is not supported, or named twice differently.
  """
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  if any(isinstance(value, Mapping) for value in rope.values()):
    raise _refuse("rope_parameters per layer type", sorted(rope), "only one RoPE for all layers is")
  kind = _rope_kind(rope)
  if kind not in _ROPE_KINDS:
    raise _refuse("rope_type", kind, f"only {' and '.join(_ROPE_KINDS)} are")
  if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
    raise _refuse("partial_rotary_factor", rope["partial_rotary_factor"], "only 1 is")
  theta = float(_number({**config, **_present(rope)}, "rope_theta", _DEFAULT_THETA))
  if kind == "default":
    return RopeConfig(theta=theta)
  return RopeConfig(
    theta=theta,
    kind="llama3",
    factor=float(_number(rope, "factor")),
    low_freq_factor=float(_number(rope, "low_freq_factor")),
    high_freq_factor=float(_number(rope, "high_freq_factor")),
    original_max_position=_integer(rope, "original_max_position_embeddings"),
  )


def _present(config: Mapping[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in config.items() if value is not None}


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
  """Reads the `config.json` of a Llama.

  Args:
    config: the parsed file.

  Returns:
    The model's shape.

  Raises:
    ValueError: naming the key and value that is missing, wrong or not supported.
  """
  _check_architecture(config)
  hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
  if heads < 1 or (config.get("head_dim") is None and hidden % heads):
    raise ValueError(f"config.json: num_attention_heads={heads}: must divide hidden_size={hidden}")
  return ModelConfig(
    vocab_size=_integer(config, "vocab_size"),
    hidden_size=hidden,
    intermediate_size=_integer(config, "intermediate_size"),
    num_layers=_integer(config, "num_hidden_layers"),
    num_heads=heads,
    num_kv_heads=_integer(config, "num_key_value_heads", heads),
    head_dim=_integer(config, "head_dim", hidden // heads),
    rope=rope_config_from_hf(config),
    rms_norm_eps=float(_number(config, "rms_norm_eps", 1e-6)),
    tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    max_position=_integer(config, "max_position_embeddings", _DEFAULT_MAX_POSITION),
    is_encoder_decoder=bool(config.get("is_encoder_decoder", False)),
  )


def eos_token_ids(
  config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
  """Every token that ends a reply: the union of both files, in order of appearance.

  Published checkpoints disagree between the two (an int here, three ids there), and missing one
  makes a reply run on past its end.
  """
  ids: list[int] = []
  for source in (config, generation_config or {}):
    value = source.get("eos_token_id")
    if value is not None:
      ids.extend(value if isinstance(value, Iterable) else (value,))
  return tuple(dict.fromkeys(ids))
