"""The one way to declare array state: a frozen dataclass that JAX sees as a pytree."""

import dataclasses
import math
from collections.abc import Callable
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
    return part.astype(dtype)
  if isinstance(part, np.ndarray):
    return part.view(np.float32)
  return jax.lax.bitcast_convert_type(part, jnp.float32)


def unpack(packed: Any, like: T) -> T:
  """The inverse of `pack`: static slices inside a jitted function, views of a numpy array outside.

  Args:
    packed: i32[.].
    like: the same tree of anything with shape and dtype.
  """
  return unpacker(like)(packed)


def unpacker(like: T) -> Callable[[Any], T]:
  """`unpack` for one `like`, which is looked at once: for records that are unpacked every step."""
  leaves, structure = jax.tree.flatten(like)
  places, at = [], 0
  for leaf in leaves:
    end = at + math.prod(leaf.shape)
    shape = None if len(leaf.shape) == 1 else leaf.shape  # what need not be done takes no time
    places.append((slice(at, end), shape, None if leaf.dtype == np.int32 else leaf.dtype))
    at = end

  def unpack_one(packed: Any) -> T:
    parts = []
    for at, shape, dtype in places:
      part = packed[at] if shape is None else packed[at].reshape(shape)
      parts.append(part if dtype is None else _from_bits(part, dtype))
    return jax.tree.unflatten(structure, parts)

  return unpack_one
