"""Products: every form gives the numbers of the plain one, and no row depends on another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model import dots, quantize

WIDTH, OUT, LAYERS = 64, 96, 3
ROWS = (1, 2, 3, 17, dots.MANY_ROWS - 1, dots.MANY_ROWS, dots.MANY_ROWS + 9)


def _weights(kind):
  rng = np.random.default_rng(0)
  plain = [rng.standard_normal((OUT, WIDTH), np.float32) / 8 for _ in range(LAYERS)]
  if kind in ("float32", "bfloat16"):
    return [jnp.asarray(w).astype(kind) for w in plain]
  parts = [quantize.QUANTIZERS[kind](w) for w in plain]
  make = quantize.Int8 if kind == "int8" else quantize.Int4
  return [make(**{name: jnp.asarray(value) for name, value in part.items()}) for part in parts]


def _x(rows):
  return jnp.asarray(np.random.default_rng(rows).standard_normal((rows, WIDTH), np.float32))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("rows", ROWS)
def test_layers_are_the_plain_product_whatever_the_axis_of_features(kind, rows):
  weights, x = _weights(kind), _x(rows)
  axis = dots.feature_axis(rows, weights[0])

  @jax.jit
  def both_ways(x, i):
    plain = dots.layer_linear(x, weights, i)
    turned = x.T if axis == 0 else x
    return plain, dots.layer_linear(turned, weights, i, axis=axis, out_axis=axis)

  for layer in range(LAYERS):
    expected = np.asarray(jax.jit(dots.linear)(x, weights[layer]))
    plain, turned = (np.asarray(y) for y in both_ways(x, layer))
    assert plain.shape == (rows, OUT)
    np.testing.assert_array_equal(plain, expected)
    np.testing.assert_array_equal(turned.T if axis == 0 else turned, expected)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_the_product_is_that_of_float64(rows):
  weight, x = _weights("float32")[0], _x(rows)
  exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
  np.testing.assert_allclose(dots.linear(x, weight), exact, atol=1e-5)


def test_few_rows_of_floats_keep_their_features_first():
  assert dots.feature_axis(1, _weights("bfloat16")[0]) == 0
  assert dots.feature_axis(dots.MANY_ROWS, _weights("bfloat16")[0]) == 1
  assert dots.feature_axis(1, _weights("int8")[0]) == 1
