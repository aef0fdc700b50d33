"""A model's logits over a text, through the engine's own forward pass, chunk by chunk."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.eval import plans
from jaxserve.model import dots, kv_cache, llama, step
from jaxserve.model.checkpoint import Checkpoint
from jaxserve.model.quantize import Quantize
from jaxserve.types import pack_plan
from pallas_kernels.ragged_paged_attention import Implementation

# Openings of four works in the public domain.
TEXT = Path(__file__).parent / "text.txt"


@functools.partial(jax.jit, static_argnames="graphdef")
def _logits(leaves: tuple[jax.Array, ...], hidden: jax.Array, graphdef: nnx.GraphDef) -> jax.Array:
  return dots.linear(hidden, llama.merge(graphdef, leaves).head)


@jax.jit
def _losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """f32[T], -log p of each target."""
  return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]


@jax.jit
def _difference(reference: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(f32[T] KL divergence of `other` from `reference`, bool[T] whether they prefer the same)."""
  p, q = jax.nn.log_softmax(reference), jax.nn.log_softmax(other)
  same = jnp.argmax(p, axis=1) == jnp.argmax(q, axis=1)
  return jnp.sum(jnp.exp(p) * (p - q), axis=1), same


class Scorer:
  """A model on the device that reads texts of up to `context` tokens."""

  def __init__(
    self,
    checkpoint: Checkpoint,
    dtype: str,
    quantize: Quantize = "none",
    context: int = 1024,
    chunk: int = 256,
    attention: Implementation = "xla",
    kv_dtype: kv_cache.KVDtype = "auto",
  ):
    if not 2 <= context <= checkpoint.config.max_position:
      raise ValueError(
        f"context={context}: must be in [2, {checkpoint.config.max_position}], the model's own"
      )
    self.context, self.chunk = context, min(chunk, context)
    config = checkpoint.config.for_context(context)
    self.weights = llama.load(config, checkpoint.params, jnp.dtype(dtype), quantize)
    self._shape = plans.plan_shape(1, self.chunk, context)
    platform = jax.default_backend()
    self._kv = kv_cache.init_kv(config, self._shape.cache, jnp.dtype(dtype), platform, kv_dtype)
    self._forward = jax.jit(
      functools.partial(
        step.forward, graphdef=self.weights[0], config=config, shape=self._shape,
        dtype=jnp.dtype(dtype), attention=attention, unroll=platform == "gpu",
      ),
      donate_argnums=1,
      compiler_options=step.compiler_options(platform),
    )  # fmt: skip

  def logits(self, tokens: Sequence[int]) -> Iterator[jax.Array]:
    """f32[n, V] of one chunk after another; row i is after tokens[i]."""
    table = np.zeros((1, self.context), np.int32)
    table[0, : len(tokens)] = tokens
    graphdef, leaves = self.weights
    for start in range(0, len(tokens), self.chunk):
      count = min(self.chunk, len(tokens) - start)
      plan = pack_plan(plans.step_plan(self._shape, 1, start, count))
      hidden, self._kv, *_ = self._forward(leaves, self._kv, table, plan)
      yield _logits(leaves, hidden, graphdef)[:count]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """How well a model predicts a text.

  Attributes:
    tokens: of the text that were predicted.
    nats: mean of -log p over them.
  """

  tokens: int
  nats: float

  @property
  def perplexity(self) -> float:
    """exp(nats)."""
    return math.exp(self.nats)


def windows(num_tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
  """(start, end, first scored) of windows that score every token but the first exactly once.

  Each has `context` tokens, of which the last `stride` are new, but for the first.
  """
  scored, start = 1, 0
  while scored < num_tokens:
    end = min(start + context, num_tokens)
    yield start, end, scored
    scored, start = end, end + stride - context


def score(scorer: Scorer, tokens: Sequence[int], stride: int) -> Score:
  """Perplexity of a text of any length.

  Args:
    scorer: the model.
    tokens: of the text.
    stride: new tokens of a window; the smaller, the more context each has, and the more work.

  Raises:
    ValueError: the text is too short, or the stride out of range.
  """
  if len(tokens) < 2:
    raise ValueError(f"text: it has {len(tokens)} tokens; at least 2 are needed")
  if not 1 <= stride < scorer.context:
    raise ValueError(f"stride={stride}: must be in [1, context={scorer.context})")
  total = 0.0
  for start, end, scored in windows(len(tokens), scorer.context, stride):
    part = np.asarray(tokens[start:end], np.int32)
    at, losses = 0, []
    for logits in scorer.logits(part[:-1]):
      losses.append(np.asarray(_losses(logits, part[at + 1 : at + 1 + len(logits)]), np.float64))
      at += len(logits)
    total += float(np.concatenate(losses)[scored - start - 1 :].sum())
  return Score(tokens=len(tokens) - 1, nats=total / (len(tokens) - 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
  """How far a model is from a reference over a text.

  Attributes:
    kl: mean KL divergence from the reference's distribution, nats a token.
    top1: share of positions where both prefer the same token.
  """

  kl: float
  top1: float


def agreement(reference: Scorer, other: Scorer, tokens: Sequence[int]) -> Agreement:
  """Compares two models on a text of at most one context."""
  divergences, same = [], []
  for p, q in zip(reference.logits(tokens), other.logits(tokens), strict=True):
    kl, equal = _difference(p, q)
    divergences.append(np.asarray(kl, np.float64))
    same.append(np.asarray(equal))
  return Agreement(
    kl=float(np.concatenate(divergences).mean()), top1=float(np.concatenate(same).mean())
  )
