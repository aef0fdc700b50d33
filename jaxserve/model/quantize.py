"""Matrices in 8 or 4 bits: how they are made of floats, on the host, and what they are on a device.

Only weights are quantized. int8 has one scale for each output channel; int4 a scale and a smallest
value for each group of inputs, and two numbers to a byte. `dots` knows how to multiply with either.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pytree import pytree_dataclass

Quantize = Literal["none", "int8", "int4"]
QUANTIZATIONS: tuple[Quantize, ...] = ("none", "int8", "int4")

_INT8_MAX, _INT4_MAX = 127, 15
_GROUP = 32  # Inputs that share a scale of int4, or the largest power of two below that divides.


@pytree_dataclass
class Int8:
  """A matrix in 8 bits.

  values: i8[out, in].
  scale: f32[out]; what values are multiplied with.
  """

  values: jax.Array
  scale: jax.Array


@pytree_dataclass
class Int4:
  """A matrix in 4 bits.

  values: u8[out, in / 2]; input i in the low half of byte i, input in / 2 + i in the high one.
  scale: f16[out, in / group]; what values, 0 to 15, are multiplied with.
  low: f16[out, in / group]; what is added then.
  """

  values: jax.Array
  scale: jax.Array
  low: jax.Array

  @property
  def group(self) -> int:
    """Inputs that share a scale."""
    return 2 * self.values.shape[1] // self.scale.shape[1]


Weight = jax.Array | Int8 | Int4


def group_size(num_inputs: int) -> int:
  """Inputs that share a scale of int4."""
  return int(np.gcd(num_inputs, _GROUP))


def part_shapes(quantize: Quantize, shape: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
  """Arrays of a quantized matrix, by the names of their fields.

  Raises:
    ValueError: an odd number of inputs has no pairs for int4.
  """
  rows, inputs = shape
  if quantize == "int8":
    parts = {"values": (shape, jnp.int8), "scale": ((rows,), jnp.float32)}
  elif inputs % 2:
    raise ValueError(f"quantize='int4': a matrix with {inputs} inputs cannot be; use 'int8'")
  else:
    groups = inputs // group_size(inputs)
    group = ((rows, groups), jnp.float16)
    parts = {"values": ((rows, inputs // 2), jnp.uint8), "scale": group, "low": group}
  return {name: jax.ShapeDtypeStruct(*part) for name, part in parts.items()}


def _divide(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """values / scale, rounded; zero where the scale is."""
  return np.rint(values / np.where(scale == 0, 1, scale))


def quantize_int8(weight: np.ndarray) -> dict[str, np.ndarray]:
  """f32[out, in] -> the parts of an `Int8`."""
  weight = np.asarray(weight, np.float32)
  scale = np.abs(weight).max(axis=1) / _INT8_MAX
  values = _divide(weight, scale[:, None])
  return {"values": values.astype(np.int8), "scale": scale.astype(np.float32)}


def quantize_int4(weight: np.ndarray) -> dict[str, np.ndarray]:
  """f32[out, in] -> the parts of an `Int4`: each group's range in 15 steps."""
  weight = np.asarray(weight, np.float32)
  rows, inputs = weight.shape
  groups = weight.reshape(rows, -1, group_size(inputs))
  low = groups.min(axis=2).astype(np.float16)
  scale = ((groups.max(axis=2) - low) / _INT4_MAX).astype(np.float16)
  whole = _divide(groups - low[..., None].astype(np.float32), scale[..., None].astype(np.float32))
  values = np.clip(whole, 0, _INT4_MAX).astype(np.uint8).reshape(rows, inputs)
  first, second = np.split(values, 2, axis=1)
  return {"values": first | (second << 4), "scale": scale, "low": low}


QUANTIZERS: Mapping[str, Callable[[np.ndarray], dict[str, np.ndarray]]] = {
  "int8": quantize_int8,
  "int4": quantize_int4,
}


def dequantized(weight: Int8 | Int4) -> jax.Array:
  """f32[out, in]."""
  if isinstance(weight, Int8):
    return weight.values.astype(jnp.float32) * weight.scale[:, None]
  nibbles = jnp.concatenate([weight.values & 15, weight.values >> 4], axis=1)
  groups = nibbles.astype(jnp.float32).reshape(*weight.scale.shape, weight.group)
  scale, low = (part.astype(jnp.float32)[..., None] for part in (weight.scale, weight.low))
  return (groups * scale + low).reshape(nibbles.shape)
