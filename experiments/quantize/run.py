"""Accuracy against float32 on a text, and the time of a decode step, variant by variant."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.eval import plans, scoring
from jaxserve.model import kv_cache, llama, step
from jaxserve.model.checkpoint import Checkpoint
from jaxserve.model.kv_cache import KVDtype
from jaxserve.model.quantize import Quantize
from jaxserve.types import pack_plan

# dtype, bits of the weights, bits of KV.
VARIANTS: Mapping[str, tuple[str, Quantize, KVDtype]] = {
  "float32": ("float32", "none", "auto"),
  "bfloat16": ("bfloat16", "none", "auto"),
  "int8": ("bfloat16", "int8", "auto"),
  "int4": ("bfloat16", "int4", "auto"),
  "int8 KV": ("bfloat16", "none", "int8"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One variant.

  Attributes:
    variant: name.
    weight_mb: on the device.
    perplexity: on the text.
    kl: mean divergence from float32, nats a token.
    top1: share of tokens whose likeliest successor is that of float32.
    decode_ms: median of a forward pass of one token for each row; None where not timed.
    speed: bfloat16's decode_ms over this one's.
  """

  variant: str
  weight_mb: float
  perplexity: float
  kl: float
  top1: float
  decode_ms: float | None = None
  speed: float | None = None


def accuracy(checkpoint: Checkpoint, tokens: Sequence[int], context: int) -> list[Row]:
  """Every variant against float32, on the first `context` tokens; perplexity on all."""
  reference = scoring.Scorer(checkpoint, "float32", context=context)
  rows = []
  for name, (dtype, quantize, kv_dtype) in VARIANTS.items():
    scorer = scoring.Scorer(checkpoint, dtype, quantize, context, kv_dtype=kv_dtype)
    apart = scoring.agreement(reference, scorer, tokens[:context])
    rows.append(
      Row(
        variant=name,
        weight_mb=sum(leaf.nbytes for leaf in scorer.weights[1]) / 1e6,
        perplexity=scoring.score(scorer, tokens, context // 2).perplexity,
        kl=apart.kl,
        top1=apart.top1,
      )
    )
  return rows


class Decoder:
  """Decode steps of `rows` requests at one context length."""

  def __init__(self, checkpoint: Checkpoint, variant: str, rows: int, context: int):
    dtype, quantize, kv_dtype = VARIANTS[variant]
    shape = plans.plan_shape(rows, 1, context)
    config, platform = checkpoint.config, jax.default_backend()
    graphdef, self._leaves = llama.load(config, checkpoint.params, jnp.dtype(dtype), quantize)
    self._kv = kv_cache.init_kv(config, shape.cache, jnp.dtype(dtype), platform, kv_dtype)
    self._table = np.zeros((rows, context), np.int32)
    self._plan = pack_plan(plans.step_plan(shape, rows, context - 1, 1))
    call = functools.partial(
      step.forward, graphdef=graphdef, config=config, shape=shape, dtype=jnp.dtype(dtype),
      unroll=platform == "gpu",
    )  # fmt: skip
    options: dict[str, Any] = step.compiler_options(platform)
    self._forward = jax.jit(call, donate_argnums=1, compiler_options=options)

  def seconds(self) -> float:
    """Of one step."""
    begin = time.perf_counter()
    hidden, self._kv, *_ = self._forward(self._leaves, self._kv, self._table, self._plan)
    jax.block_until_ready(hidden)
    return time.perf_counter() - begin


def decode_times(
  checkpoint: Checkpoint, variants: Sequence[str], rows: int, context: int, repeats: int
) -> dict[str, float]:
  """Medians in milliseconds; the variants take turns, so a slow minute falls upon all of them."""
  decoders = {name: Decoder(checkpoint, name, rows, context) for name in variants}
  for decoder in decoders.values():
    for _ in range(3):
      decoder.seconds()
  times: dict[str, list[float]] = {name: [] for name in variants}
  for _ in range(repeats):
    for name, decoder in decoders.items():
      times[name].append(decoder.seconds())
  return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def with_times(rows: Sequence[Row], times: Mapping[str, float]) -> list[Row]:
  """The rows with what a step takes, and how much faster than bfloat16 that is."""
  return [
    dataclasses.replace(
      row,
      decode_ms=times.get(row.variant),
      speed=times["bfloat16"] / times[row.variant] if row.variant in times else None,
    )
    for row in rows
  ]
