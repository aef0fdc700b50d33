"""RoPE as a `config.json` spells it: flat, nested, or under the keys of older versions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.config import RopeConfig
from jaxserve.model.hf_fields import integer, number, present, refuse

_DEFAULT_THETA = 10_000.0
# Kinds by their name in a file. "dynamic" only acts beyond the model's own context, which we do not
# serve: its frequencies would depend on the length of the moment, and cached keys would be wrong.
_KINDS: Mapping[str, str] = {
  "default": "default",
  "dynamic": "default",
  "linear": "linear",
  "llama3": "llama3",
  "yarn": "yarn",
  "longrope": "longrope",
  "su": "longrope",
}
_ORIGINAL = "original_max_position_embeddings"
# Rotations other than that of whole heads by one position.
_UNSUPPORTED = ("mrope_section", "mrope_interleaved", "xpos_scale_base")
# What Llama 3.1, 3.2 and 3.3 have in common, and only they.
_LLAMA_3_1: Mapping[str, Any] = {
  "vocab_size": 128256,
  "max_position_embeddings": 131072,
}


def _kind_name(rope: Mapping[str, Any]) -> str:
  kinds = {key: rope[key] for key in ("rope_type", "type") if rope.get(key) is not None}
  if len(set(map(repr, kinds.values()))) > 1:
    named = " and ".join(f"{key}={value!r}" for key, value in kinds.items())
    raise ValueError(
      f"config.json: RoPE has both {named}; keep the one that the model was made for"
    )
  return next(iter(kinds.values()), "default")


def _section(config: Mapping[str, Any]) -> dict[str, Any]:
  """The object that describes the scaling; empty where there is none."""
  for key in ("rope_parameters", "rope_scaling"):
    value = config.get(key)
    if not value:
      continue
    if not isinstance(value, Mapping):
      raise ValueError(f"config.json: {key}={value!r}: an object is needed")
    if any(isinstance(item, Mapping) for item in value.values()):
      raise refuse(f"{key} per layer type", sorted(value), "only one RoPE for all layers is")
    return present(value)
  return {}


def _kind(config: Mapping[str, Any], rope: Mapping[str, Any]) -> str:
  name = _kind_name(rope)
  if not isinstance(name, str) or name not in _KINDS:
    raise refuse("rope_type", name, f"only {', '.join(_KINDS)} are")
  if name == "yarn" and config.get("model_type") == "phi3":  # What its first files called it.
    return "longrope"
  return _KINDS[name]


def _check(config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
  for key in _UNSUPPORTED:
    if rope.get(key):
      raise refuse(key, rope[key], "only one position for a token is")
  for source in (rope, config):
    if source.get("partial_rotary_factor") not in (None, 1, 1.0):
      raise refuse("partial_rotary_factor", source["partial_rotary_factor"], "only 1 is")


def _context(config: Mapping[str, Any], default: int) -> int:
  return integer(config, "max_position_embeddings", default)


def _original(config: Mapping[str, Any], rope: Mapping[str, Any], default: int) -> int:
  """The context before stretching: inside of the section, else beside it, else all of it."""
  for source in (rope, config):
    if source.get(_ORIGINAL) is not None:
      return integer(source, _ORIGINAL)
  return _context(config, default)


def _factors(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
  values = rope.get(key)
  if not isinstance(values, Sequence) or isinstance(values, str) or not values:
    raise ValueError(f"config.json: {key}={values!r}: longrope needs a list of numbers")
  return tuple(float(number({key: value}, key)) for value in values)


def _magnitude(factor: float, weight: float = 1.0) -> float:
  """By which yarn scales cosines and sines."""
  return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
  if "attention_factor" in rope:
    return float(number(rope, "attention_factor"))
  weight, whole = rope.get("mscale"), rope.get("mscale_all_dim")
  if weight and whole:
    weights = number(rope, "mscale"), number(rope, "mscale_all_dim")
    return _magnitude(factor, weights[0]) / _magnitude(factor, weights[1])
  return _magnitude(factor)


def _longrope_scale(rope: Mapping[str, Any], factor: float, original: int) -> float:
  if "attention_factor" in rope:
    return float(number(rope, "attention_factor"))
  return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def rope_config_from_hf(config: Mapping[str, Any], default_context: int = 2048) -> RopeConfig:
  """Reads RoPE from any spelling.

  Args:
    config: a `config.json`: flat `rope_theta` with `rope_scaling` (transformers 4), or
      `rope_parameters` (transformers 5). A null is read as absent.
    default_context: the family's `max_position_embeddings`, for files without it.

  Returns:
    The rotary embedding.

  Raises:
    ValueError: if the scaling is of a kind that is not supported, or named twice differently.
  """
  rope = _section(config)
  kind = _kind(config, rope)
  _check(config, rope)
  theta = float(number({**config, **rope}, "rope_theta", _DEFAULT_THETA))
  if kind == "default":
    return RopeConfig(theta=theta)
  if kind == "linear":
    return RopeConfig(theta=theta, kind="linear", factor=float(number(rope, "factor")))
  if kind == "llama3":
    return RopeConfig(
      theta=theta,
      kind="llama3",
      factor=float(number(rope, "factor")),
      low_freq_factor=float(number(rope, "low_freq_factor")),
      high_freq_factor=float(number(rope, "high_freq_factor")),
      original_max_position=integer(rope, _ORIGINAL),
    )
  original = _original(config, rope, default_context)
  factor = float(number(rope, "factor", _context(config, default_context) / max(original, 1)))
  if kind == "yarn":
    return RopeConfig(
      theta=theta,
      kind="yarn",
      factor=factor,
      original_max_position=original,
      beta_fast=float(number(rope, "beta_fast", 32)),
      beta_slow=float(number(rope, "beta_slow", 1)),
      truncate=bool(rope.get("truncate", True)),
      attention_scale=_yarn_scale(rope, factor),
    )
  return RopeConfig(
    theta=theta,
    kind="longrope",
    original_max_position=original,
    short_factor=_factors(rope, "short_factor"),
    long_factor=_factors(rope, "long_factor"),
    attention_scale=_longrope_scale(rope, factor, original),
  )


def max_position_from_hf(config: Mapping[str, Any], default: int) -> int:
  """The longest context: `max_position_embeddings`, or what yarn stretches the original to.

  Qwen2.5's yarn is turned on by hand, and its files keep the context of training.
  """
  context, rope = _context(config, default), _section(config)
  if _kind(config, rope) != "yarn" or rope.get("factor") is None:
    return context
  return max(context, int(_original(config, rope, default) * number(rope, "factor")))


def rope_warnings(config: Mapping[str, Any]) -> list[str]:
  """What is suspicious about a readable file: a RoPE that was lost on the way, or contradicts.

  Such a model loads, answers, and is quietly wrong.
  """
  rope, warnings = _section(config), []
  kind = _kind_name(rope)
  family = all(config.get(key) == value for key, value in _LLAMA_3_1.items())
  if family and config.get("model_type") == "llama" and kind != "llama3":
    found = "no RoPE scaling" if kind == "default" else f"rope_type={kind!r}"
    warnings.append(
      f"config.json has {found}, but its vocabulary and context are those of Llama 3.1, which was "
      "trained with rope_type='llama3'; if the scaling was lost, copy rope_scaling from the "
      "original model, or answers degrade, the longer the context the more"
    )
  flat, inner = config.get("rope_theta"), rope.get("rope_theta")
  if flat is not None and inner is not None and flat != inner:
    warnings.append(
      f"config.json has rope_theta={flat!r} and, inside of its RoPE section, {inner!r}; "
      f"{inner!r} is used"
    )
  if config.get("rope_parameters") and config.get("rope_scaling"):
    other = config["rope_scaling"]
    if isinstance(other, Mapping) and _kind_name(other) != kind:
      warnings.append(
        f"config.json has both rope_parameters ({kind}) and rope_scaling ({_kind_name(other)}); "
        "rope_parameters is used"
      )
  if kind == "dynamic":
    warnings.append(
      "config.json has rope_type='dynamic', which acts beyond the model's own context only; the "
      f"model is served up to max_position_embeddings={config.get('max_position_embeddings')!r}, "
      "where it is exact"
    )
  return warnings
