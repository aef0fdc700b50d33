"""A tiny random model of every family, saved by transformers, with what transformers computes."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

NUM_PROMPT, NUM_GREEDY = 41, 64
_VOCAB = 61
# Greedy tokens must not hang on a rounding: the runner-up is at least so far behind.
_CLEAR_GAP = 1e-3
_SEEDS = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """Name of transformers' class without its endings, and the configuration that differs."""

  base: str
  options: Mapping[str, Any]


def _family(base: str, **options: Any) -> Family:
  shape = {
    "vocab_size": _VOCAB, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
  }  # fmt: skip
  return Family(base=base, options=shape | options)


def _rope(kind: str, theta: float = 100.0, **fields: Any) -> dict[str, Any]:
  return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **fields}}


_LLAMA3 = _rope(
  "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=64,
)  # fmt: skip
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=32)
_SHORT, _LONG = [1.0, 1.1, 1.3, 1.6], [1.0, 2.0, 3.5, 4.0]
_NO_HEAD_DIM = {"head_dim": None}


def _longrope(original: int) -> dict[str, Any]:
  return {
    **_rope("longrope", short_factor=_SHORT, long_factor=_LONG),
    "original_max_position_embeddings": original,
  }


FAMILIES: Mapping[str, Family] = {
  "llama2": _family("Llama", num_attention_heads=3, num_key_value_heads=3, **_rope("default", 1e4)),
  "llama3": _family("Llama", tie_word_embeddings=True, **_LLAMA3),
  "smollm2": _family(
    "Llama", num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True,
    **_rope("default", 1e5),
  ),
  "llama_linear": _family("Llama", **_rope("linear", factor=4.0)),
  "llama_dynamic": _family("Llama", **_rope("dynamic", factor=2.0)),
  "llama_biases": _family("Llama", attention_bias=True, mlp_bias=True, rms_norm_eps=1e-6),
  "mistral": _family("Mistral", sliding_window=7),
  "nemo": _family("Mistral", sliding_window=None, head_dim=10),
  "qwen2": _family("Qwen2", tie_word_embeddings=True, rms_norm_eps=1e-6, **_rope("default", 1e6)),
  "qwen2_yarn_windows": _family(
    "Qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1, **_YARN
  ),
  "qwen3": _family("Qwen3", head_dim=12, rms_norm_eps=1e-6, **_rope("default", 1e6)),
  "phi3": _family("Phi3", hidden_size=32, sliding_window=11),
  "phi3_long": _family("Phi3", hidden_size=32, **_longrope(32)),
  "phi3_short": _family("Phi3", hidden_size=32, **_longrope(120)),
  "gemma": _family(
    "Gemma", num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-6,
    hidden_act="gelu_pytorch_tanh",
  ),
}  # fmt: skip


def _make(family: Family, seed: int) -> Any:
  """The model in float32, of numbers that bfloat16 holds exactly."""
  import torch
  import transformers

  config_class = getattr(transformers, f"{family.base}Config")
  model_class = getattr(transformers, f"{family.base}ForCausalLM")
  options = dict(family.options)
  if family.base == "Phi3" or family.options["head_dim"] is None:
    del options["head_dim"]
  if family.base == "Qwen2":  # Derived; the class keeps the key, and its projections do not.
    options["head_dim"] = options["hidden_size"] // options["num_attention_heads"]
  model = model_class(config_class(**options, attn_implementation="eager")).to(torch.float32)
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, values in model.named_parameters():
      noise = torch.randn(values.shape, generator=generator)
      if "norm" in name:
        noise = 0.1 * noise + (0 if family.base == "Gemma" else 1)
      elif name.endswith("bias"):
        noise = 0.3 * noise
      else:
        noise = noise / values.shape[-1] ** 0.5
      values.copy_(noise.to(torch.bfloat16))
  return model.eval()


def _logits(model: Any, tokens: list[int]) -> np.ndarray:
  import torch

  with torch.no_grad():
    return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def _greedy(model: Any, prompt: list[int]) -> list[int] | None:
  """The continuation; None if one of its tokens is nearly a tie."""
  tokens = list(prompt)
  for _ in range(NUM_GREEDY):
    last = _logits(model, tokens)[-1]
    second, first = np.sort(last)[-2:]
    if first - second < _CLEAR_GAP:
      return None
    tokens.append(int(last.argmax()))
  return tokens[len(prompt) :]


def _tokenizer_json() -> str:
  from tokenizers import Tokenizer, models, pre_tokenizers

  vocab = {f"w{i}": i for i in range(_VOCAB)}
  tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  return tokenizer.to_str()


def write(name: str, folder: Path, scratch: Path) -> None:
  """Writes checkpoint and golden numbers of one family into `folder`.

  Raises:
    RuntimeError: no seed gives a continuation without near ties.
  """
  import torch

  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  for seed in range(_SEEDS):
    model = _make(FAMILIES[name], seed)
    prompt = np.random.default_rng(seed).integers(_VOCAB, size=NUM_PROMPT).tolist()
    greedy = _greedy(model, prompt)
    if greedy is not None:
      break
  else:
    raise RuntimeError(f"{name}: every seed has a near tie")
  np.savez_compressed(
    folder / "golden.npz",
    prompt=np.asarray(prompt, np.int32),
    logits=_logits(model, prompt),
    greedy=np.asarray(greedy, np.int32),
  )
  model.to(torch.bfloat16).save_pretrained(scratch)
  for file in ("config.json", "generation_config.json", "model.safetensors"):
    shutil.copyfile(scratch / file, folder / file)
  (folder / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
