"""transformers' LlamaForCausalLM on our parameters. Needs torch and transformers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.config import ModelConfig


def hf_config(config: ModelConfig) -> dict[str, Any]:
  """`config` as a config.json of transformers 5."""
  rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
  if config.rope.kind == "llama3":
    rope |= {
      "factor": config.rope.factor,
      "low_freq_factor": config.rope.low_freq_factor,
      "high_freq_factor": config.rope.high_freq_factor,
      "original_max_position_embeddings": config.rope.original_max_position,
    }
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": config.vocab_size,
    "hidden_size": config.hidden_size,
    "intermediate_size": config.intermediate_size,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "rope_parameters": rope,
    "rms_norm_eps": config.rms_norm_eps,
    "tie_word_embeddings": config.tie_word_embeddings,
    "max_position_embeddings": config.max_position,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
  }


def hf_tensors(config: ModelConfig, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Our parameters under transformers' names, unfused. Written apart from the reader under test."""
  q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
  tensors = {
    "model.embed_tokens.weight": params["embed"],
    "model.norm.weight": params["norm"],
    "lm_head.weight": params["embed" if config.tie_word_embeddings else "lm_head"],
  }
  for i in range(config.num_layers):
    ours, theirs = f"layers.{i}", f"model.layers.{i}"
    qkv, gate_up = params[f"{ours}.qkv"], params[f"{ours}.gate_up"]
    tensors |= {
      f"{theirs}.input_layernorm.weight": params[f"{ours}.input_norm"],
      f"{theirs}.self_attn.q_proj.weight": qkv[:q],
      f"{theirs}.self_attn.k_proj.weight": qkv[q : q + kv],
      f"{theirs}.self_attn.v_proj.weight": qkv[q + kv :],
      f"{theirs}.self_attn.o_proj.weight": params[f"{ours}.o"],
      f"{theirs}.post_attention_layernorm.weight": params[f"{ours}.post_norm"],
      f"{theirs}.mlp.gate_proj.weight": gate_up[: config.intermediate_size],
      f"{theirs}.mlp.up_proj.weight": gate_up[config.intermediate_size :],
      f"{theirs}.mlp.down_proj.weight": params[f"{ours}.down"],
    }
  return tensors


def reference_logits(
  config: ModelConfig, params: Mapping[str, np.ndarray], tokens: np.ndarray
) -> np.ndarray:
  """f32[len(tokens), V], logits after each of `tokens`."""
  import torch
  import transformers

  settings = hf_config(config)
  del settings["architectures"], settings["model_type"]
  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**settings, attn_implementation="eager")
  ).to(torch.float32)
  state = {
    name: torch.from_numpy(np.array(array, dtype=np.float32))
    for name, array in hf_tensors(config, params).items()
  }
  model.load_state_dict(state, strict=True)
  with torch.no_grad():
    logits = model.eval()(torch.from_numpy(np.asarray(tokens, np.int64))[None]).logits
  return logits[0].numpy()
