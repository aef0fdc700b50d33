"""What this machine can do at most: plain products of a model's shapes, and reading memory."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_READ_BYTES = 1 << 29


def seconds(fn, *args):
  """Of one call, until its results are there."""
  start = time.perf_counter()
  jax.block_until_ready(fn(*args))
  return time.perf_counter() - start


def layer_shapes(model):
  """(out, in) of the products of one layer."""
  q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
  width, inner = model.hidden_size, model.intermediate_size
  return [(q + 2 * kv, width), (width, q), (2 * inner, width), (width, inner)]


def prefill_flops(model, prompt):
  """Products of all layers, causal attention, and the head on one row."""
  products = sum(2 * prompt * n * k for n, k in layer_shapes(model)) * model.num_layers
  attention = 2 * model.num_layers * model.num_heads * model.head_dim * prompt * prompt
  return products + attention + 2 * model.vocab_size * model.hidden_size


def plain_products(model, tokens, dtype):
  """All products of a layer, nothing else, as separate two-dimensional calls; their FLOPs.

  Both operand orders are timed by the caller; the faster one counts.
  """
  rng, operands = np.random.default_rng(0), []
  for n, k in layer_shapes(model):
    weight = jnp.asarray(rng.standard_normal((n, k), np.float32), dtype)
    operands.append((jnp.asarray(rng.standard_normal((tokens, k), np.float32), dtype), weight))

  def product(x, w, weight_first):
    left, right = (w, x) if weight_first else (x, w)
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)

  calls = {
    first: [jax.jit(lambda x, w, f=first: product(x, w, f)).lower(x, w).compile()
            for x, w in operands]
    for first in (False, True)
  }  # fmt: skip

  def run(first):
    return [call(x, w) for call, (x, w) in zip(calls[first], operands, strict=True)]

  flops = sum(2 * tokens * n * k for n, k in layer_shapes(model))
  return run, flops


def product_flops_per_s(products, flops):
  """Of the faster operand order, the best of three calls each."""
  return flops / min(min(seconds(products, first) for _ in range(3)) for first in (False, True))


def read_bandwidth():
  """A function that gives bytes a second of summing a large array."""
  data = jnp.ones(_READ_BYTES // 4, jnp.float32)
  total = jax.jit(jnp.sum)
  jax.block_until_ready(total(data))
  return lambda: _READ_BYTES / seconds(total, data)
