"""A tiny engine, built once for a process, and a plain forward pass to hold against it."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from jaxserve import sched
from jaxserve.config import CacheConfig, ModelConfig, SchedulerConfig
from jaxserve.engine import Engine, EngineConfig, drafting
from jaxserve.engine.speculation import Speculate
from jaxserve.engine.store import ExecutableStore
from jaxserve.model import llama
from tests.testing import caches

MODEL = ModelConfig(
  vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=4, num_kv_heads=2,
  head_dim=6, max_position=128,
)  # fmt: skip
SCHEDULER = SchedulerConfig(
  cache=CacheConfig(num_pages=23, page_size=5),
  max_num_seqs=5, max_requests=7, max_budget=61, max_model_len=61,
)  # fmt: skip
# All layers of MODEL but the last.
DRAFT_MODEL = dataclasses.replace(MODEL, num_layers=2)
# A token that the random model says early, so that stopping can be tested.
EOS = 17


@functools.cache
def weights(seed: int = 0, attention: float = 1.0, last: float = 1.0):
  """Random weights, with some of them made smaller.

  Args:
    seed: of all.
    attention: with less of it the last token says most of the next, so a text soon goes round.
    last: with less of the last layer, a model that lacks it says much the same.
  """

  def scale(name):
    of_last = name.startswith(f"layers.{MODEL.num_layers - 1}.")
    attends, writes = name.endswith(".o"), name.endswith((".o", ".down"))
    return np.float32((attention if attends else 1) * (last if of_last and writes else 1))

  return {name: value * scale(name) for name, value in llama.random_params(MODEL, seed).items()}


def draft_weights(attention: float):
  last = f"layers.{DRAFT_MODEL.num_layers}."
  params = weights(attention=attention, last=0.1)
  return {name: value for name, value in params.items() if not name.startswith(last)}


@functools.cache
def tiny_engine(**overrides) -> Engine:
  """One engine per configuration; tests leave it idle and set the parameters they need."""
  return build_engine(shared_store(), **overrides)


def shared_store() -> ExecutableStore:
  """What the tests of this run have compiled so far."""
  return ExecutableStore(caches.cache_dir() / "executables")


def build_engine(
  store: ExecutableStore | None = None, params: dict | None = None,
  draft: drafting.Weights | None = None, **overrides,
) -> Engine:  # fmt: skip
  """An engine of the test's own; with other weights on request."""
  fields = dict(
    model=MODEL, scheduler=SCHEDULER, dtype="float32", token_buckets=(2, 8, 24, 61),
    query_tile=16,
  )  # fmt: skip
  graphdef, leaves = llama.load(MODEL, params or weights(), jnp.dtype("float32"))
  config = EngineConfig(**(fields | overrides))
  return Engine.build(config, graphdef, leaves, store=store, draft=draft)


@functools.cache
def pair(kind: str, attention: float = 1.0, policy: str = "vllm_v1") -> tuple[Engine, Engine]:
  """An engine without drafts and one with, of the same weights and as few executables as go."""
  params = weights(attention=attention, last=0.1 if kind == "draft" else 1.0)
  fields = dict(token_buckets=(8, 61), params=params)
  plain = build_engine(shared_store(), **fields)
  fields |= dict(scheduler=dataclasses.replace(SCHEDULER, max_drafts=3, policy=policy))
  if kind == "ngram":
    fields |= dict(speculate=Speculate(kind="ngram", k=3, shortest=1))
    return plain, build_engine(shared_store(), **fields)
  draft = drafting.Weights(*llama.load(DRAFT_MODEL, draft_weights(attention), jnp.dtype("float32")))
  fields |= dict(speculate=Speculate(kind="draft", k=3, model="tiny"), draft_model=DRAFT_MODEL)
  fields |= dict(token_buckets=(61,))
  return plain, build_engine(shared_store(), draft=draft, **fields)


def idle_engine(budget: int = 61, **params) -> Engine:
  """The shared engine with these scheduler parameters; it must have been left idle."""
  engine = tiny_engine()
  assert engine.num_requests == 0 and engine.step() is None
  assert engine.num_free_pages == SCHEDULER.cache.num_pages
  engine.set_params(sched.make_params(SCHEDULER, budget=budget, **params))
  engine.guard.count = 0  # what other engines compiled meanwhile is not this one's
  return engine


def plain_logits(params, config: ModelConfig, tokens, dtype=np.float64, last=None) -> np.ndarray:
  """[T, V] by a whole-sequence forward in numpy: no cache, no pages, no chunks.

  `last` keeps only the last so many rows.
  """
  p = {k: np.asarray(v, dtype) for k, v in params.items()}
  x = p["embed"][np.asarray(tokens)]
  length, d = len(x), config.head_dim
  angle = np.arange(length)[:, None] / config.rope.theta ** (np.arange(0, d, 2) / d)[None]
  cos, sin = (f(angle)[:, None].astype(dtype) for f in (np.cos, np.sin))

  def norm(x, gain):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * gain

  def rotate(x):
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  group = config.num_heads // config.num_kv_heads
  mask = np.tril(np.ones((length, length), bool))
  for i in range(config.num_layers):
    w = {k.split(".")[-1]: v for k, v in p.items() if k.startswith(f"layers.{i}.")}
    heads = (norm(x, w["input_norm"]) @ w["qkv"].T).reshape(length, -1, d)
    q, k, v = np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], 1)
    k, v = rotate(k).repeat(group, 1), v.repeat(group, 1)
    scores = rotate(q).swapaxes(0, 1) @ k.transpose(1, 2, 0) / np.sqrt(d).astype(dtype)
    scores = np.where(mask, scores, -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    x = x + (probs @ v.swapaxes(0, 1)).swapaxes(0, 1).reshape(length, -1) @ w["o"].T
    gate, up = np.split(norm(x, w["post_norm"]) @ w["gate_up"].T, 2, -1)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T
  head = p["embed"] if config.tie_word_embeddings else p["lm_head"]
  return norm(x[-last:] if last else x, p["norm"]) @ head.T


def plain_greedy(params, config: ModelConfig, prompt, count: int) -> tuple[int, ...]:
  tokens = list(prompt)
  for _ in range(count):
    tokens.append(int(plain_logits(params, config, tokens)[-1].argmax()))
  return tuple(tokens[len(prompt) :])
