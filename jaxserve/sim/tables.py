"""Step times measured on a grid, read between its points. Traceable."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


class Table:
  """A function known on a grid, linear in every coordinate between neighbours.

  Beyond the ends of an axis the outermost two points are continued, so a table never goes flat.

  Args:
    axes: one rising sequence a coordinate, of at least two values each.
    values: f64[len(axis), ...], finite.

  Raises:
    ValueError: shapes do not fit, an axis does not rise, or a value is missing.
  """

  def __init__(self, axes: Sequence[Sequence[float]], values: np.ndarray):
    self._axes = [np.asarray(axis, np.float32) for axis in axes]
    self._values = np.asarray(values, np.float32)
    shape = tuple(len(axis) for axis in self._axes)
    if self._values.shape != shape:
      raise ValueError(f"values: have shape {self._values.shape}, the axes are of {shape}")
    for number, axis in enumerate(self._axes):
      if len(axis) < 2 or not (np.diff(axis) > 0).all():
        raise ValueError(f"axes[{number}]={axis.tolist()}: needs two values or more, rising")
    if not np.isfinite(self._values).all():
      where = tuple(int(i) for i in np.argwhere(~np.isfinite(self._values))[0])
      raise ValueError(f"values{list(where)}: is missing; fill every point of the grid")

  def __call__(self, *point: jax.Array) -> jax.Array:
    """The value at a point, f32[...] of the coordinates' common shape.

    Cost: 2^d reads for d coordinates, and a comparison with every value of every axis.
    """
    cells, parts = zip(
      *(_place(axis, x) for axis, x in zip(self._axes, point, strict=True)), strict=True
    )  # fmt: skip
    values, total = jnp.asarray(self._values), jnp.zeros((), jnp.float32)
    for corner in itertools.product((0, 1), repeat=len(cells)):
      weight = jnp.ones((), jnp.float32)
      for part, upper in zip(parts, corner, strict=True):
        weight = weight * (part if upper else 1.0 - part)
      at = tuple(cell + upper for cell, upper in zip(cells, corner, strict=True))
      total = total + weight * values[at]
    return total


def _place(axis: np.ndarray, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(the interval of the axis that x is in, how far along it x is)."""
  x = jnp.asarray(x, jnp.float32)
  cell = jnp.sum(x[..., None] >= jnp.asarray(axis[1:-1]), axis=-1, dtype=jnp.int32)
  low, width = jnp.asarray(axis[:-1])[cell], jnp.asarray(np.diff(axis))[cell]
  return cell, (x - low) / width
