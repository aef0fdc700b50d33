"""The one way to declare array state: a frozen dataclass that JAX sees as a pytree."""

import dataclasses
import math
from typing import Any, TypeVar, cast, dataclass_transform

import jax
import jax.numpy as jnp
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


def pack(tree: Any) -> jax.Array:
  """All leaves, int32 or bool, end to end in one i32 array: one buffer to pass or to copy."""
  return jnp.concatenate([jnp.ravel(leaf).astype(jnp.int32) for leaf in jax.tree.leaves(tree)])


def unpack(packed: Any, like: T) -> T:
  """The inverse of `pack`: static slices inside a jitted function, views of a numpy array outside.

  Args:
    packed: i32[.].
    like: the same tree of anything with shape and dtype.
  """
  leaves, structure = jax.tree.flatten(like)
  parts, at = [], 0
  for leaf in leaves:
    part = packed[at : at + math.prod(leaf.shape)].reshape(leaf.shape)
    parts.append(part if part.dtype == leaf.dtype else part.astype(leaf.dtype))
    at += math.prod(leaf.shape)
  return jax.tree.unflatten(structure, parts)
