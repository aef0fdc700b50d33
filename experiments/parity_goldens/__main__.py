"""Writes the golden logits; see README.md."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from absl import app, flags, logging

from experiments.parity_goldens import reference
from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.model.llama import random_params

_OUT = flags.DEFINE_string("out", "tests/golden", "Directory to write to.")

_NUM_TOKENS = 41
_MAX_BYTES = 300_000
# The scaling acts on these sizes: some frequencies are kept, some blended, some divided.
_LLAMA3 = RopeConfig(theta=100.0, kind="llama3", factor=8.0, original_max_position=64)

CONFIGS = {
  "mha_tied": ModelConfig(
    vocab_size=97, hidden_size=27, intermediate_size=37, num_layers=2, num_heads=3,
    num_kv_heads=3, head_dim=10, tie_word_embeddings=True, max_position=128,
  ),
  "gqa2_llama3": ModelConfig(
    vocab_size=101, hidden_size=36, intermediate_size=53, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, rope=_LLAMA3, rms_norm_eps=1e-6, max_position=128,
  ),
  "gqa3_tied": ModelConfig(
    vocab_size=103, hidden_size=45, intermediate_size=43, num_layers=3, num_heads=9,
    num_kv_heads=3, head_dim=6, rope=RopeConfig(theta=1e5), tie_word_embeddings=True,
    max_position=128,
  ),
}  # fmt: skip


def _write(name: str, config: ModelConfig, seed: int) -> None:
  params = random_params(config, seed)
  tokens = np.random.default_rng(seed).integers(config.vocab_size, size=_NUM_TOKENS)
  tokens = tokens.astype(np.int32)
  path = Path(_OUT.value) / f"llama_{name}.npz"
  np.savez_compressed(
    path,
    config=np.array(json.dumps(dataclasses.asdict(config))),
    tokens=tokens,
    logits=reference.reference_logits(config, params, tokens),
    **{f"params/{key}": value for key, value in params.items()},
  )
  size = path.stat().st_size
  if size > _MAX_BYTES:
    raise ValueError(f"{path} has {size} bytes; keep golden files under {_MAX_BYTES}")
  logging.info("%s: %d bytes", path, size)


def main(argv: list[str]) -> None:
  del argv
  Path(_OUT.value).mkdir(parents=True, exist_ok=True)
  for seed, (name, config) in enumerate(CONFIGS.items()):
    _write(name, config, seed)


if __name__ == "__main__":
  app.run(main)
