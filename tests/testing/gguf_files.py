"""Tiny GGUF files, written as the converter of llama.cpp writes them."""

from pathlib import Path

import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.model.llama import random_params

# 256 byte tokens in the GPT-2 alphabet, one merge and two control tokens.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_TOKENS = [
  chr(byte) if byte in _PRINTABLE else chr(256 + _OTHERS.index(byte)) for byte in range(256)
]
TOKENS = [*BYTE_TOKENS, "he", "<|im_start|>", "<|im_end|>"]
TOKEN_TYPES = [1] * 257 + [3, 3]
CHAT_TEMPLATE = "{{ '<|im_start|>' }}"

# Widths are multiples of 32, the block of the quantizations.
CONFIG = ModelConfig(
  vocab_size=len(TOKENS),
  hidden_size=64,
  intermediate_size=96,
  num_layers=2,
  num_heads=6,
  num_kv_heads=3,
  head_dim=16,
  max_position=128,
)
_LAYER = {
  "attn_norm": "input_norm",
  "attn_output": "o",
  "ffn_norm": "post_norm",
  "ffn_down": "down",
}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
  """What llama.cpp's converter does to q and k, row by row: i + D/2 comes to stand after i."""
  head_dim = weight.shape[0] // num_heads
  half = head_dim // 2
  order = [
    head * head_dim + offset + i
    for head in range(num_heads)
    for i in range(half)
    for offset in (0, half)
  ]
  return weight[order]


def gguf_tensors(config: ModelConfig, params) -> dict[str, np.ndarray]:
  q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
  tensors = {"token_embd.weight": params["embed"], "output_norm.weight": params["norm"]}
  if not config.tie_word_embeddings:
    tensors["output.weight"] = params["lm_head"]
  for i in range(config.num_layers):
    qkv, gate_up = params[f"layers.{i}.qkv"], params[f"layers.{i}.gate_up"]
    parts = {
      "attn_q": permute(qkv[:q], config.num_heads),
      "attn_k": permute(qkv[q : q + kv], config.num_kv_heads),
      "attn_v": qkv[q + kv :],
      "ffn_gate": gate_up[: config.intermediate_size],
      "ffn_up": gate_up[config.intermediate_size :],
    }
    parts |= {theirs: params[f"layers.{i}.{ours}"] for theirs, ours in _LAYER.items()}
    tensors |= {f"blk.{i}.{name}.weight": array for name, array in parts.items()}
  return tensors


def add_fields(writer, config: ModelConfig) -> None:
  writer.add_block_count(config.num_layers)
  writer.add_context_length(config.max_position)
  writer.add_embedding_length(config.hidden_size)
  writer.add_feed_forward_length(config.intermediate_size)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_rope_dimension_count(config.head_dim)
  writer.add_rope_freq_base(config.rope.theta)
  writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_tokenizer(writer, pre: str = "smollm") -> None:
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(TOKENS)
  writer.add_token_types(TOKEN_TYPES)
  writer.add_token_merges(["h e"])
  writer.add_bos_token_id(257)
  writer.add_eos_token_id(258)
  writer.add_chat_template(CHAT_TEMPLATE)


def write_gguf(
  path: Path,
  config: ModelConfig = CONFIG,
  *,
  quantization: str = "F32",
  drop: str = "",
  extra=None,
  architecture: str = "llama",
  pre: str = "smollm",
  fields=None,
):
  """Writes a random Llama, with further `fields(writer)`; returns its parameters."""
  from gguf import GGMLQuantizationType, GGUFWriter
  from gguf.quants import quantize

  params = random_params(config, seed=0)
  kind = GGMLQuantizationType[quantization]
  writer = GGUFWriter(path, architecture)
  add_fields(writer, config)
  add_tokenizer(writer, pre)
  if fields is not None:
    fields(writer)
  for name, array in (gguf_tensors(config, params) | (extra or {})).items():
    if name == drop:
      continue
    if array.ndim == 1 or quantization == "F32":
      writer.add_tensor(name, np.ascontiguousarray(array))
    else:
      writer.add_tensor(name, quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return params


def write_k_quants(path: Path, config: ModelConfig, quantization: str) -> dict[str, np.ndarray]:
  """Writes a model whose matrices are random blocks of 256; returns the bytes of each row."""
  from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

  kind = GGMLQuantizationType[quantization]
  count, size = GGML_QUANT_SIZES[kind]
  rng = np.random.default_rng(0)
  writer = GGUFWriter(path, "llama")
  add_fields(writer, config)
  add_tokenizer(writer)
  rows = {}
  for name, array in gguf_tensors(config, random_params(config, seed=0)).items():
    if array.ndim == 1:
      writer.add_tensor(name, np.ascontiguousarray(array))
      continue
    assert array.shape[1] == count
    blocks = rng.integers(256, size=(array.shape[0], size)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.1, (array.shape[0], 2)).astype(np.float16).view(np.uint8)
    blocks[:, :4] = scales if quantization == "Q4_K" else blocks[:, :4]
    blocks[:, -2:] = scales[:, :2] if quantization == "Q6_K" else blocks[:, -2:]
    rows[name] = blocks
    writer.add_tensor(name, blocks, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return rows
