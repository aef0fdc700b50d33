"""Hugging Face `config.json` of the Llama family, read strictly: what is not supported is an error.

A reader that ignores a key it does not know serves a model that is quietly wrong (a lost RoPE
scaling costs 0.25 nats at 361 tokens), so every key that changes the forward pass is looked at.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.config import Activation, ModelConfig
from jaxserve.model.hf_fields import integer, number, refuse
from jaxserve.model.hf_rope import max_position_from_hf, rope_config_from_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """What transformers' class of an architecture does that its `config.json` may not say.

  Attributes:
    model_type: as the file has it.
    max_position: where the file has none.
    rms_norm_eps: where the file has none.
    head_dim: where the file has none; None: hidden_size / num_attention_heads.
    tied: whether the head is the embedding, where the file does not say.
    mha: whether absent `num_key_value_heads` means as many as query heads.
    biases: matrices that always have a bias.
    attention_bias: whether the key of that name adds biases to attention.
    qk_norm: queries and keys are normalised.
    window: `sliding_window` where the file has none.
    gated_window: whether the window also needs `use_sliding_window`.
    one_plus_gain: gains of norms are stored as their difference from one.
    scaled_embedding: embeddings are multiplied by sqrt(hidden_size).
    activations: names of the gate's activation -> ours.
  """

  model_type: str
  max_position: int
  rms_norm_eps: float = 1e-6
  head_dim: int | None = None
  tied: bool = False
  mha: bool = False
  biases: tuple[str, ...] = ()
  attention_bias: bool = False
  qk_norm: bool = False
  window: int | None = None
  gated_window: bool = False
  one_plus_gain: bool = False
  scaled_embedding: bool = False
  activations: Mapping[str, Activation] = dataclasses.field(
    default_factory=lambda: {"silu": "silu", "swish": "silu"}
  )


# Gemma's files say "gelu" and mean, as its trainers do, the approximation by tanh.
_GELU: Mapping[str, Activation] = {"gelu": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
FAMILIES: Mapping[str, Family] = {
  "LlamaForCausalLM": Family(
    model_type="llama", max_position=2048, mha=True, attention_bias=True
  ),
  "MistralForCausalLM": Family(model_type="mistral", max_position=131072, window=4096),
  "Qwen2ForCausalLM": Family(
    model_type="qwen2", max_position=32768, biases=("qkv",), gated_window=True, window=4096
  ),
  "Qwen3ForCausalLM": Family(
    model_type="qwen3", max_position=32768, head_dim=128, qk_norm=True, attention_bias=True,
    gated_window=True, window=4096,
  ),
  "Phi3ForCausalLM": Family(
    model_type="phi3", max_position=4096, rms_norm_eps=1e-5, mha=True
  ),
  "GemmaForCausalLM": Family(
    model_type="gemma", max_position=8192, head_dim=256, tied=True, one_plus_gain=True,
    scaled_embedding=True, activations=_GELU, attention_bias=True,
  ),
}  # fmt: skip
# Further keys that change the forward pass, with the values under which they change nothing.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
  "final_logit_softcapping": (),
  "attn_logit_softcapping": (),
  "num_local_experts": (),
  "num_experts": (),
}
_QUANTIZED = (
  "use the model's unquantized checkpoint (--quantize makes int8 or int4 of it), or a GGUF file"
)


def family_of(config: Mapping[str, Any]) -> Family:
  """The family of a `config.json`; a ValueError that names what it is instead."""
  names = config.get("architectures") or ()
  supported = f"use a checkpoint of {', '.join(FAMILIES)}"
  if not isinstance(names, list | tuple):
    raise refuse("architectures", names, supported)
  for name in names:
    if not isinstance(name, str) or name not in FAMILIES:
      raise refuse("architectures", name, supported)
  if names:
    return FAMILIES[names[0]]
  for family in FAMILIES.values():
    if family.model_type == config.get("model_type"):
      return family
  raise refuse("model_type", config.get("model_type"), supported)


def refuse_quantized(config: Mapping[str, Any], file: str = "config.json") -> None:
  """Raises a ValueError that names the method, if the weights are not plain numbers.

  Args:
    config: a `config.json`, or the `hf_quant_config.json` that NVIDIA's tools put beside it.
    file: which.
  """
  for key in ("quantization_config", "quantization", "compression_config"):
    section = config.get(key)
    if section is None:
      continue
    fields = section if isinstance(section, Mapping) else {}
    method = fields.get("quant_method") or fields.get("quant_algo") or section
    raise ValueError(
      f"{file}: {key} says that the weights are quantized ({method}), which is not supported; "
      f"{_QUANTIZED}"
    )


def _biases(config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
  biases = list(family.biases)
  if config.get("attention_bias"):
    if not family.attention_bias:
      raise refuse("attention_bias", config["attention_bias"], f"{family.model_type} has none")
    biases += ["qkv", "o"]
  if config.get("mlp_bias"):
    if family.model_type != "llama":
      raise refuse("mlp_bias", config["mlp_bias"], f"{family.model_type} has none")
    biases += ["gate_up", "down"]
  return tuple(dict.fromkeys(biases))


def _window(config: Mapping[str, Any], family: Family, layers: int) -> dict[str, Any]:
  """The fields `sliding_window` and `full_layers`."""
  if family.window is None and family.model_type != "phi3":
    if config.get("sliding_window") is not None:
      raise refuse("sliding_window", config["sliding_window"], f"{family.model_type} has none")
    return {}
  if family.gated_window and not config.get("use_sliding_window"):
    return {}
  # An explicit null turns the window off; only a key that is not there means the default.
  window = config.get("sliding_window", family.window)
  if window is None:
    return {}
  gated = family.gated_window or config.get("layer_types") is not None
  full = _full_layers(config, layers) if gated else ()
  if len(full) == layers:
    return {}
  return {
    "sliding_window": integer({"sliding_window": window}, "sliding_window"),
    "full_layers": full,
  }


def _full_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
  types = config.get("layer_types")
  if types is None:  # The first `max_window_layers` layers have no window, whatever the name says.
    return tuple(range(min(integer(config, "max_window_layers", 28), layers)))
  if not isinstance(types, list | tuple) or len(types) != layers:
    raise ValueError(f"config.json: layer_types={types!r} must have {layers} entries")
  for kind in types:
    if kind not in ("full_attention", "sliding_attention"):
      raise refuse("layer_types", kind, "only full_attention and sliding_attention are")
  return tuple(i for i, kind in enumerate(types) if kind == "full_attention")


def _activation(config: Mapping[str, Any], family: Family) -> Activation:
  default = next(iter(family.activations))
  name = config.get("hidden_activation") or config.get("hidden_act") or default
  if name not in family.activations:
    raise refuse("hidden_act", name, f"only {' or '.join(family.activations)} is")
  return family.activations[name]


def _check(config: Mapping[str, Any]) -> None:
  refuse_quantized(config)
  for key, neutral in _NEUTRAL_VALUES.items():
    value = config.get(key)
    if value is not None and value not in neutral:
      raise refuse(key, value, "only its absence is")


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
  """Reads the `config.json` of a model of the Llama family.

  Args:
    config: the parsed file.

  Returns:
    The model's shape.

  Raises:
    ValueError: naming the key and value that is missing, wrong or not supported.
  """
  family = family_of(config)
  _check(config)
  hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
  layers = integer(config, "num_hidden_layers")
  derived = config.get("head_dim") is None and family.head_dim is None
  if heads < 1 or (derived and hidden % heads):
    raise ValueError(f"config.json: num_attention_heads={heads}: must divide hidden_size={hidden}")
  tied = config.get("tie_word_embeddings")
  return ModelConfig(
    vocab_size=integer(config, "vocab_size"),
    hidden_size=hidden,
    intermediate_size=integer(config, "intermediate_size"),
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=integer(config, "num_key_value_heads", heads if family.mha else None),
    head_dim=integer(config, "head_dim", family.head_dim or hidden // heads),
    rope=rope_config_from_hf(config, family.max_position),
    rms_norm_eps=float(number(config, "rms_norm_eps", family.rms_norm_eps)),
    tie_word_embeddings=family.tied if tied is None else bool(tied),
    max_position=max_position_from_hf(config, family.max_position),
    is_encoder_decoder=bool(config.get("is_encoder_decoder", False)),
    biases=_biases(config, family),
    qk_norm=family.qk_norm,
    activation=_activation(config, family),
    embed_scale=math.sqrt(hidden) if family.scaled_embedding else 1.0,
    **_window(config, family, layers),
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
    values = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    ids.extend(integer({"eos_token_id": v}, "eos_token_id") for v in values if v is not None)
  return tuple(dict.fromkeys(ids))
