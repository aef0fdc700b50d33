"""Parameters that are read when somebody asks for them, so a model need not be in memory twice."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

_ALIGNMENT = 64  # XLA:CPU uses a buffer in place from this alignment on.

Params = Mapping[str, Any]


class LazyParams(Mapping[str, np.ndarray]):
  """Arrays by name; every access reads the array anew, from any thread, and keeps nothing.

  Attributes:
    shapes: of every array.
    num_bytes: to be read for all of them.
  """

  def __init__(
    self,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    num_bytes: int,
  ):
    self.shapes, self.num_bytes = shapes, num_bytes
    self._read = read

  def __getitem__(self, name: str) -> np.ndarray:
    if name not in self.shapes:
      raise KeyError(name)
    return self._read(name)

  def __contains__(self, name: object) -> bool:
    return name in self.shapes

  def __iter__(self) -> Iterator[str]:
    return iter(self.shapes)

  def __len__(self) -> int:
    return len(self.shapes)

  def map(self, change: Callable[[str, np.ndarray], np.ndarray]) -> "LazyParams":
    """The same arrays, each passed through `change` as it is read; shapes stay."""
    return LazyParams(self.shapes, lambda name: change(name, self[name]), self.num_bytes)


def shape_of(params: Params, name: str) -> tuple[int, ...]:
  """The shape of an array, without reading it."""
  return params.shapes[name] if isinstance(params, LazyParams) else tuple(params[name].shape)


def num_bytes(params: Params) -> int:
  """Bytes of all arrays, without reading them."""
  if isinstance(params, LazyParams):
    return params.num_bytes
  return sum(int(array.nbytes) for array in params.values())


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """An uninitialised array that XLA:CPU need not copy to use."""
  size = math.prod(shape) * dtype.itemsize
  raw = np.empty(size + _ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % _ALIGNMENT
  return raw[start : start + size].view(dtype).reshape(shape)
