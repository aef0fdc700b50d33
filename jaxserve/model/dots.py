"""How a product with a weight is written, which on a CPU decides a factor of 3 to 10.

Weights are [out, in], as in checkpoints. On XLA:CPU only bfloat16 x bfloat16 -> float32 reaches the
matrix units, and what costs is preparing the right operand. So:

* few rows: the weight is the left operand, so only the small activations are prepared;
* many rows: the activations are the left operand, and preparing the weight is amortised;
* one row: doubled, since a bfloat16 product of one row misses the fast kernel (10 times slower);
* barriers keep transposes out of the product's dimension numbers, which would miss it too;
* in a loop over layers, a switch picks the layer's weight: the products themselves are the
  branches, so no weight is stacked, sliced or copied, and everything else compiles once.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

# From this many rows on, the activations are the left operand.
MANY_ROWS = 64

_barrier = lax.optimization_barrier


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
  """x @ weight.T in the weight's dtype with float32 sums.

  Args:
    x: [T, in], float.
    weight: [out, in].

  Returns:
    f32[T, out].
  """
  return _leave(_product(_enter(x, weight.dtype), weight), x.shape[0])


def layer_linear(x: jax.Array, weights: Sequence[jax.Array], layer: jax.Array | int) -> jax.Array:
  """`linear` with the weight of one layer: a Python index unrolls, a traced one switches."""
  if isinstance(layer, int):
    return linear(x, weights[layer])
  operand = _enter(x, weights[0].dtype)
  branches = [lambda operand, w=w: _product(operand, w) for w in weights]
  return _leave(lax.switch(layer, branches, operand), x.shape[0])


def _enter(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Activations as the product wants them: [max(T, 2), in] in the weight's dtype."""
  if x.shape[0] == 1:
    x = jnp.concatenate([x, x])
  return _barrier(x.astype(dtype))


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
  """f32[out, T] for few rows, f32[T, out] for many."""
  left, right = (x, weight) if x.shape[0] >= MANY_ROWS else (weight, x)
  precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  out = lax.dot_general(
    left, right, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
  )
  return _barrier(out)


def _leave(product: jax.Array, rows: int) -> jax.Array:
  return product if rows >= MANY_ROWS else product.T[:rows]
