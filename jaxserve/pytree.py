"""The one way to declare array state: a frozen dataclass that JAX sees as a pytree."""

import dataclasses
from typing import Any, TypeVar, cast, dataclass_transform

import jax
import numpy as np

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree_dataclass(cls: type[T]) -> type[T]:
  """Makes `cls` a frozen, keyword-only dataclass whose every field is a pytree child.

  Static facts (shapes, modes) do not belong in such a record; they live in the plain frozen
  dataclasses of `jaxserve.config` and are passed beside it.
  """
  return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


def scalar(value: Any, dtype: type[np.generic]) -> jax.Array:
  """A host number in the place of a 0-d array: no device is touched before a jitted call."""
  return cast(jax.Array, dtype(value))
