"""Weights in 8 and 4 bits: what is kept of the numbers, and products with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model import dots, llama
from jaxserve.model.quantize import (
  Int4,
  Int8,
  dequantized,
  group_size,
  quantize_int4,
  quantize_int8,
)
from tests.model.llama_test import CONFIG, PAGES, Runner, _one_row

KINDS = {"int8": (Int8, quantize_int8), "int4": (Int4, quantize_int4)}


def made(kind, weight):
  cls, quantize = KINDS[kind]
  return cls(**{name: jnp.asarray(part) for name, part in quantize(weight).items()})


def normal(shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class TestNumbers:
  def test_int8_is_off_by_half_a_step_of_its_row_at_most(self):
    weight = normal((37, 50)) * np.geomspace(1e-3, 1e3, 37)[:, None]
    back = np.asarray(dequantized(made("int8", weight)))
    step = np.abs(weight).max(1, keepdims=True) / 127
    assert (np.abs(back - weight) <= 0.501 * step).all()

  @pytest.mark.parametrize("inputs", [64, 96, 24, 50])
  def test_int4_is_off_by_half_a_step_of_its_groups_range_at_most(self, inputs):
    weight = normal((7, inputs)) + 0.5
    back = np.asarray(dequantized(made("int4", weight)))
    groups = weight.reshape(7, -1, group_size(inputs))
    step = np.ptp(groups, axis=2, keepdims=True) / 15
    error = np.abs(back.reshape(groups.shape) - groups)
    assert (error <= 0.5 * step + 2e-3 * np.abs(groups).max()).all()

  def test_four_bits_come_back_in_their_places(self):
    weight = np.random.default_rng(0).integers(-8, 8, (5, 128)).astype(np.float32)
    weight[:, ::32], weight[:, 1::32] = -8, 7  # The range of each group, so the scale is one.
    np.testing.assert_array_equal(dequantized(made("int4", weight)), weight)
    assert made("int4", weight).values.nbytes == weight.size / 2

  @pytest.mark.parametrize("kind", KINDS)
  def test_zeros_stay_zeros(self, kind):
    np.testing.assert_array_equal(dequantized(made(kind, np.zeros((3, 64), np.float32))), 0)

  def test_an_odd_number_of_inputs_is_refused_by_int4(self):
    config = dataclasses.replace(CONFIG, intermediate_size=13)
    with pytest.raises(ValueError, match="quantize='int4'.*13 inputs.*'int8'"):
      llama.load(config, llama.random_params(config, 0), jnp.float32, "int4")

  def test_another_name_is_refused(self):
    with pytest.raises(ValueError, match="quantize='fp8': use one of none, int8, int4"):
      llama.load(CONFIG, llama.random_params(CONFIG, 0), jnp.float32, "fp8")


class TestProducts:
  @pytest.mark.parametrize("rows", [1, 8, 17, 70])
  def test_int8_multiplies_with_the_weights_and_rounds_activations_to_14_bits(self, rows):
    weight, x = normal((33, 64)), normal((rows, 64), 1) * 100
    quantized = made("int8", weight)
    expected = x.astype(np.float64) @ np.asarray(dequantized(quantized), np.float64).T
    got = jax.jit(dots.linear)(x, quantized)
    assert np.abs(got - expected).max() < 3e-4 * np.abs(expected).max()

  @pytest.mark.parametrize("rows", [1, 70])
  def test_elsewhere_than_on_a_cpu_int8_is_dequantized_inside_the_product(self, rows, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    weight, x = normal((33, 64)), normal((rows, 64), 1)
    quantized = made("int8", weight)
    got = dots.linear(x, quantized)
    assert np.abs(got - x @ weight.T).max() < 2e-2 * np.abs(got).max()

  @pytest.mark.parametrize("rows", [1, 8, 70])
  def test_int4_is_dequantized_to_bfloat16(self, rows):
    weight, x = normal((33, 64)), normal((rows, 64), 1)
    quantized = made("int4", weight)
    expected = x @ np.asarray(dequantized(quantized)).T
    got = jax.jit(dots.linear)(x, quantized)
    assert np.abs(got - expected).max() < 2e-2 * np.abs(expected).max()

  def test_a_row_of_int8_does_not_depend_on_the_others_bit_by_bit(self):
    quantized, x = made("int8", normal((33, 64))), normal((70, 64), 1)
    linear = jax.jit(dots.linear)
    alone = np.asarray(linear(x[3:4], quantized))
    for rows in (5, 16, 17, 64, 70):
      np.testing.assert_array_equal(np.asarray(linear(x[:rows], quantized))[3:4], alone)

  def test_a_row_of_zeros(self):
    quantized = made("int8", normal((5, 8)))
    np.testing.assert_array_equal(dots.linear(jnp.zeros((2, 8)), quantized), 0)


@pytest.mark.parametrize(("kind", "unroll"), [("int8", False), ("int8", True), ("int4", False)])
def test_a_quantized_model_is_the_model_of_its_dequantized_weights(kind, unroll):
  config = dataclasses.replace(CONFIG, intermediate_size=26)
  exact, quantized = (Runner(config, attention="ref", unroll=u) for u in (False, unroll))
  names = [n for n in exact.params if n.rsplit(".", 1)[-1] in ("qkv", "o", "gate_up", "down")]
  rounded = {n: np.asarray(dequantized(made(kind, exact.params[n]))) for n in names}
  rounded["lm_head"] = np.asarray(dequantized(made("int8", exact.params["lm_head"])))
  exact.graphdef, exact.leaves = llama.load(config, exact.params | rounded, jnp.float32)
  quantized.graphdef, quantized.leaves = llama.load(config, exact.params, jnp.float32, kind)
  rows = [_one_row(2, 0, 17, PAGES)]
  expected, got = exact.forward(rows)[0][0], quantized.forward(rows)[0][0]
  assert np.abs(got - expected).max() < (0.05 if kind == "int4" else 0.005)
  head = llama.merge(quantized.graphdef, quantized.leaves).head
  np.testing.assert_array_equal(dequantized(head), rounded["lm_head"])
