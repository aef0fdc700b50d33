"""How a product with a weight is written, which on a CPU decides a factor of 3 to 10.

Weights are [out, in], as in checkpoints. On XLA:CPU only bfloat16 x bfloat16 -> float32 reaches the
matrix units, and what costs is preparing the right operand. So:

* few rows: the weight is the left operand, so only the small activations are prepared;
* many rows: the activations are the left operand, and preparing the weight is amortised;
* one row: doubled, since a bfloat16 product of one row misses the fast kernel (10 times slower);
* barriers keep transposes out of the product's dimension numbers, which would miss it too;
* in a loop over layers, a switch picks the layer's weight: the products themselves are the
  branches, so no weight is stacked, sliced or copied, and everything else compiles once;
* converting a weight costs several times the product, so int8 weights are multiplied as they are:
  an activation is split into two int8 digits, 14 bits of its row's largest, and both products,
  exact in int32, are added up. Rows stay independent, bit by bit, whatever the form.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.model.quantize import Int4, Int8, Weight, dequantized

# From this many rows on, the activations are the left operand.
MANY_ROWS = 64

# Up to so many rows int8 weights are the right operand: there they are 1.4 times as fast.
_FEW_ROWS_INT8 = 16
# The largest number of two digits, each of which fits int8: 127 * 128 + 63, less a margin.
_LARGEST = 127.0 * 128
_TINY = 1e-30

_barrier = lax.optimization_barrier


def linear(x: jax.Array, weight: Weight) -> jax.Array:
  """x @ weight.T in the weight's dtype with float32 sums.

  Args:
    x: [T, in], float.
    weight: [out, in]; 4-bit weights are dequantized to bfloat16 first.

  Returns:
    f32[T, out].
  """
  operand = _enter(x, weight)
  return _leave(_product(operand, weight), operand, x.shape[0])


def layer_linear(
  x: jax.Array,
  weights: Sequence[Weight],
  layer: jax.Array | int,
  *,
  axis: int = 1,
  out_axis: int = 1,
) -> jax.Array:
  """`linear` with the weight of one layer: a Python index unrolls, a traced one switches.

  Args:
    x: [T, in], or [in, T] if `axis` is 0.
    weights: of every layer.
    layer: which.
    axis: of x that the product sums over; 0 only where `feature_axis` says so.
    out_axis: the same of the result.

  Returns:
    f32[T, out], or [out, T] if `out_axis` is 0.
  """
  rows = x.shape[1 - axis]
  operand = _enter(x, weights[0], axis)
  if isinstance(layer, int):
    product = _product(operand, weights[layer], axis)
  else:
    branches = [lambda operand, w=w: _product(operand, w, axis) for w in weights]
    product = lax.switch(layer, branches, operand)
  if out_axis == 0:
    return product[:, :rows]
  return _leave(product, operand, rows)


def feature_axis(rows: int, weight: Weight) -> int:
  """The axis of features that is fast between two products when all else is elementwise.

  Products of few rows are [out, T]: nothing need be transposed on the way to the next one, and what
  is elementwise reads memory in order. All products of 32 rows take 0.87 of the time so, of 16 and
  fewer the same.
  """
  return 0 if rows < MANY_ROWS and not _in_digits(weight) else 1


def _in_digits(weight: Weight) -> bool:
  """Whether the weight is multiplied as int8. Compilers for GPUs convert it inside the product."""
  return isinstance(weight, Int8) and jax.default_backend() == "cpu"


def _enter(x: jax.Array, weight: Weight, axis: int = 1) -> Any:
  """Activations as the product wants them; here, not in the product, as all layers share it.

  For floats [max(T, 2), in] in the weight's dtype, or the transpose if `axis` is 0; for int8 on a
  CPU their digits, see `_digits`.
  """
  if _in_digits(weight):
    return _barrier(_digits(x))
  if x.shape[1 - axis] == 1:
    x = jnp.concatenate([x, x], axis=1 - axis)
  return _barrier(x.astype(weight.dtype if isinstance(weight, jax.Array) else jnp.bfloat16))


def _product(operand: Any, weight: Weight, axis: int = 1) -> Any:
  """f32[out, T] for few rows, f32[T, out] for many.

  For int8 on a CPU the int32 sums of the digits, i32[2T, out], and the scale of the outputs: what
  follows from these is the same for all layers, so `_leave` does it.
  """
  if isinstance(weight, Int8) and _in_digits(weight):
    return _int8_product(operand[0], weight), weight.scale
  matrix = weight if isinstance(weight, jax.Array) else dequantized(weight).astype(jnp.bfloat16)
  matrix = _barrier(matrix) if isinstance(weight, Int4) else matrix
  if operand.shape[1 - axis] >= MANY_ROWS:
    return _barrier(_dot(operand, matrix, jnp.float32))
  return _barrier(_dot(matrix, operand, jnp.float32, axis))


def _leave(product: Any, operand: Any, rows: int) -> jax.Array:
  """f32[rows, out]."""
  if not isinstance(product, tuple):
    return product if rows >= MANY_ROWS else product.T[:rows]
  sums, out_scale = product
  high, low = jnp.split(sums.astype(jnp.float32), 2)
  return (high * 128 + low) * operand[1] * out_scale[None]


def _dot(left: jax.Array, right: jax.Array, out: type, right_axis: int = 1) -> jax.Array:
  precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
  dims = (((1,), (right_axis,)), ((), ()))
  return lax.dot_general(left, right, dims, precision=precision, preferred_element_type=out)


def _digits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(i8[2T, in] high digits above low ones, f32[T, 1] scale): x = (128 high + low) * scale."""
  largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
  scale = jnp.maximum(largest, _TINY) / _LARGEST
  whole = jnp.round(x / scale)
  high = jnp.floor((whole + 64) / 128)
  return jnp.concatenate([high, whole - 128 * high]).astype(jnp.int8), scale


def _int8_product(digits: jax.Array, weight: Int8) -> jax.Array:
  """i32[2T, out]."""
  if digits.shape[0] <= 2 * _FEW_ROWS_INT8:
    return _barrier(_dot(digits, weight.values, jnp.int32))
  return _barrier(_dot(weight.values, digits, jnp.int32)).T
