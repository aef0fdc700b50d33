"""Tables that are read between their points."""

import jax
import numpy as np
import pytest

from jaxserve import sim

AXES = ((0, 1, 4), (10, 20), (0, 5, 6, 9))


def test_nodes_are_exact():
  values = np.random.default_rng(0).uniform(size=(3, 2, 4)).astype(np.float32)
  table = jax.jit(sim.Table(AXES, values))
  for index in np.ndindex(values.shape):
    at = [axis[i] for axis, i in zip(AXES, index, strict=True)]
    np.testing.assert_allclose(table(*at), values[index], rtol=1e-6)


def test_linear_functions_are_exact_between_and_beyond():
  grid = np.meshgrid(*AXES, indexing="ij")
  table = sim.Table(AXES, 1 + 2 * grid[0] - 3 * grid[1] + 0.5 * grid[2])
  for a, b, c in ((0.5, 15, 5.5), (3, 12, 8), (10, 40, 20)):
    np.testing.assert_allclose(table(a, b, c), 1 + 2 * a - 3 * b + 0.5 * c, rtol=1e-5)


def test_a_table_that_is_none_is_refused():
  with pytest.raises(ValueError, match=r"values: have shape \(2,\), the axes are of \(3,\)"):
    sim.Table([(1, 2, 3)], np.zeros(2))
  with pytest.raises(ValueError, match=r"axes\[0\]=\[2.0, 1.0\]: needs two values or more, rising"):
    sim.Table([(2, 1)], np.zeros(2))
  with pytest.raises(ValueError, match=r"values\[1\]: is missing"):
    sim.Table([(1, 2)], np.array([0, np.nan]))
