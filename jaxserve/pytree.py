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
  """All leaves end to end in one i32 array: one buffer to pass or to copy.

  Leaves are int32, bool, or float32, of which the bits are kept.
  """
  return jnp.concatenate([_bits(jnp.ravel(leaf)) for leaf in jax.tree.leaves(tree)])


def _bits(leaf: jax.Array) -> jax.Array:
  if leaf.dtype == jnp.float32:
    return jax.lax.bitcast_convert_type(leaf, jnp.int32)
  return leaf.astype(jnp.int32)


def _from_bits(part: Any, dtype: Any) -> Any:
  if dtype != np.float32:
    return part if part.dtype == dtype else part.astype(dtype)
  if isinstance(part, np.ndarray):
    return part.view(np.float32)
  return jax.lax.bitcast_convert_type(part, jnp.float32)


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
    parts.append(_from_bits(part, leaf.dtype))
    at += math.prod(leaf.shape)
  return jax.tree.unflatten(structure, parts)
