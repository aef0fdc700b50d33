"""Facts of published models, and copies of them as found in the wild: each parses, or is refused.

`data/published_configs.json` holds the keys of their files that say what the model is.
"""

import json
from pathlib import Path

import pytest

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.model import hf_config, hf_rope

FILES = json.loads((Path(__file__).parent / "data" / "published_configs.json").read_text())


def model(vocab, hidden, inner, layers, heads, kv_heads, dim, longest, theta, eps=1e-5, **more):
  return ModelConfig(
    vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
    num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, max_position=longest, rms_norm_eps=eps,
    **{"rope": RopeConfig(theta=theta)} | more,
  )  # fmt: skip


def llama3(factor):
  return RopeConfig(theta=5e5, kind="llama3", factor=factor)


TIED = {"tie_word_embeddings": True}
QWEN3 = {"eps": 1e-6, "qk_norm": True}
QWEN2 = {"eps": 1e-6, "biases": ("qkv",)}
# name -> (the model, its end-of-sequence ids).
GOOD = {
  "CodeLlama-34b-Instruct-hf": (model(32000, 8192, 22016, 48, 64, 8, 128, 16384, 1e6), (2,)),
  "CodeLlama-7b-hf": (model(32016, 4096, 11008, 32, 32, 32, 128, 16384, 1e6), ()),
  "Llama-2-7b-hf": (model(32000, 4096, 11008, 32, 32, 32, 128, 4096, 1e4), (2,)),
  "Llama-3-8B": (model(128256, 4096, 14336, 32, 32, 8, 128, 8192, 5e5), (128001, 128009)),
  "Llama-3.1-70B-Instruct-FP8": (
    model(128256, 8192, 28672, 80, 64, 8, 128, 131072, 5e5, rope=llama3(8)),
    (128001, 128008, 128009),
  ),
  "Llama-3.1-8B-Instruct.rope_scaling_lost": (
    model(128256, 4096, 14336, 32, 32, 8, 128, 131072, 5e5), (128009,),
  ),
  "Llama-3.1-8B": (
    model(128256, 4096, 14336, 32, 32, 8, 128, 131072, 5e5, rope=llama3(8)), (128001,),
  ),
  "Llama-3.2-1B-Instruct": (
    model(128256, 2048, 8192, 16, 32, 8, 64, 131072, 5e5, rope=llama3(32), **TIED),
    (128001, 128008, 128009),
  ),
  "Llama-3.2-3B": (
    model(128256, 3072, 8192, 28, 24, 8, 128, 131072, 5e5, rope=llama3(32), **TIED), (128001,),
  ),
  "Mistral-7B-v0.1": (
    model(32000, 4096, 14336, 32, 32, 8, 128, 32768, 1e4, sliding_window=4096), (2,),
  ),
  "Mistral-Nemo-Instruct-2407": (
    model(131072, 5120, 14336, 40, 32, 8, 128, 131072, 1e6), (2,),
  ),
  "Mistral-Small-24B-dolphin": (
    model(131074, 5120, 32768, 40, 32, 8, 128, 32768, 1e8), (2, 131072),
  ),
  "Phi-3-mini-4k-instruct": (
    model(32064, 3072, 8192, 32, 32, 32, 96, 4096, 1e4, sliding_window=2047), (32000,),
  ),
  "Qwen2.5-0.5B-Instruct": (
    model(151936, 896, 4864, 24, 14, 2, 64, 32768, 1e6, **QWEN2, **TIED), (151645,),
  ),
  "Qwen2.5-7B-Instruct": (
    model(152064, 3584, 18944, 28, 28, 4, 128, 32768, 1e6, **QWEN2), (151645,),
  ),
  "Qwen3-0.6B": (
    model(151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e6, **QWEN3, **TIED), (151645,),
  ),
  "Qwen3-14B": (model(151936, 5120, 17408, 40, 40, 8, 128, 40960, 1e6, **QWEN3), (151645,)),
  "Qwen3-8B": (model(151936, 4096, 12288, 36, 32, 8, 128, 40960, 1e6, **QWEN3), (151645,)),
  "SmolLM2-135M": (model(49152, 576, 1536, 30, 9, 3, 64, 8192, 1e5, **TIED), ()),
  "SmolLM2-360M": (model(49152, 960, 2560, 32, 15, 5, 64, 8192, 1e5, **TIED), ()),
  "TinyLlama-1.1B-Chat-v1.0": (model(32000, 2048, 5632, 22, 32, 4, 64, 2048, 1e4), (2,)),
  "Yi-1.5-6B": (model(64000, 4096, 11008, 32, 32, 4, 128, 4096, 5e6, 1e-6), (2,)),
  "Yi-34B": (model(64000, 7168, 20480, 60, 56, 8, 128, 4096, 5e6), (2,)),
  "gemma-2b-it": (
    model(256000, 2048, 16384, 18, 8, 1, 256, 8192, 1e4, 1e-6, activation="gelu_tanh",
          embed_scale=2048**0.5, **TIED),
    (1,),
  ),
}  # fmt: skip
# name -> what the refusal names.
REFUSED = {
  "Llama-3.1-8B-Instruct.bnb8": "bitsandbytes",
  "Llama-3.1-8B.finetune_linear_rope": "bitsandbytes",
  "Qwen3-32B-FP8": "fp8",
  "Qwen3.5-text": "qwen3_5_text",
}
SUSPICIOUS = ("Llama-3.1-8B-Instruct.rope_scaling_lost", "Llama-3.1-8B.finetune_linear_rope")


def test_every_file_is_in_one_of_the_tables():
  assert sorted(FILES) == sorted([*GOOD, *REFUSED])


@pytest.mark.parametrize("name", GOOD)
def test_it_is_read(name):
  config, generation = FILES[name]["config"], FILES[name].get("generation_config")
  wanted, eos = GOOD[name]
  assert hf_config.model_config_from_hf(config) == wanted
  assert hf_config.eos_token_ids(config, generation) == eos


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name):
  with pytest.raises(ValueError, match=REFUSED[name]):
    hf_config.model_config_from_hf(FILES[name]["config"])


@pytest.mark.parametrize("name", FILES)
def test_a_lost_or_replaced_scaling_is_warned_about_and_nothing_else_is(name):
  assert bool(hf_rope.rope_warnings(FILES[name]["config"])) == (name in SUSPICIOUS)


def test_without_the_quantization_the_linear_finetune_is_read():
  config = FILES["Llama-3.1-8B.finetune_linear_rope"]["config"] | {"quantization_config": None}
  rope = hf_config.model_config_from_hf(config).rope
  assert rope == RopeConfig(theta=5e5, kind="linear", factor=8.0)


def test_fp8_declared_in_a_side_file_is_refused():
  """As NVIDIA's tools write it: config.json itself says bfloat16."""
  side = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
  with pytest.raises(ValueError, match=r"hf_quant_config\.json.*FP8.*unquantized checkpoint"):
    hf_config.refuse_quantized(side, "hf_quant_config.json")
