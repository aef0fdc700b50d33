"""The tensors of one or several *.safetensors files, read straight into memory of the caller.

The library `safetensors` opens every file, and so judges its header; the bytes are then read, not
mapped: mapped pages count as memory of the process, which would hold the model twice.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_LFS_MAGIC = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100 << 20  # Of the format; a header is read whole, so this bounds memory too.
_SUPPORTED = ("F32", "F16", "BF16")
_READ_BYTES = 1 << 28  # Of one read; Linux gives at most 2 GB at once.


class Tensor(NamedTuple):
  """Where a tensor lies: file, name of its dtype, shape, and its bytes [start, stop)."""

  path: Path
  dtype: str
  shape: tuple[int, ...]
  start: int
  stop: int


def numpy_dtype(name: str) -> np.dtype:
  """The numpy dtype of a safetensors dtype that is among the supported."""
  import ml_dtypes

  return np.dtype({"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[name])


def refuse_lfs_pointer(path: Path) -> None:
  """Raises a ValueError if git left a pointer in the place of the file."""
  with path.open("rb") as file:
    if file.read(len(_LFS_MAGIC)) == _LFS_MAGIC:
      raise ValueError(f"{path} is a git-LFS pointer, not the file itself; run `git lfs pull`")


def inside(directory: Path, name: object) -> Path:
  """`directory / name`, where `name` comes from a file of the checkpoint.

  Raises:
    ValueError: if it leads out of `directory`, by dots, a root or a link. A cache of the hub, whose
      files are links into a `blobs` folder beside `snapshots`, is allowed.
  """
  if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
    raise ValueError(f"{directory}: its index names {name!r}, which is no file of this directory")
  path = directory / name
  root = _root(directory)
  if not path.resolve().is_relative_to(root):
    raise ValueError(f"{path} is a link to {path.resolve()}, out of {root}; copy the file here")
  return path


def _root(directory: Path) -> Path:
  """What links may point into: the directory, or the model's folder in a cache of the hub."""
  resolved = directory.resolve()
  in_hub = resolved.parent.name == "snapshots" and (resolved.parents[1] / "blobs").is_dir()
  return resolved.parents[1] if in_hub else resolved


def _entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any], int]]:
  """(name, entry, where the data begins) of every tensor of a file that the library accepts."""
  from safetensors import safe_open

  refuse_lfs_pointer(path)
  try:
    with safe_open(path, "numpy"):
      pass
    with path.open("rb") as file:
      (size,) = struct.unpack("<Q", file.read(8))
      if size > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes")
      header = json.loads(file.read(size))
  except Exception as error:  # SafetensorError derives from Exception alone.
    raise ValueError(f"{path} is truncated or corrupt ({error}); get it again") from None
  for name, entry in header.items():
    if name != "__metadata__":
      yield name, entry, 8 + size


def read_headers(paths: Sequence[Path]) -> dict[str, Tensor]:
  """Where every tensor of the files lies.

  Raises:
    ValueError: naming the file that is a git-LFS pointer, truncated or corrupt, or the tensor that
      is there twice.
  """
  tensors: dict[str, Tensor] = {}
  for path in paths:
    for name, entry, begin in _entries(path):
      if name in tensors:
        raise ValueError(f"tensor {name!r} is in {tensors[name].path.name} and in {path.name}")
      start, stop = entry["data_offsets"]
      tensors[name] = Tensor(
        path, entry["dtype"], tuple(entry["shape"]), begin + start, begin + stop
      )
  return tensors


def check_dtype(name: str, tensor: Tensor) -> None:
  """Raises a ValueError if the tensor's numbers are not plain floats."""
  if tensor.dtype not in _SUPPORTED:
    remedy = "save it as F32"
    if tensor.dtype != "F64":
      remedy = "the weights seem to be quantized: use the model's unquantized checkpoint"
    raise ValueError(
      f"tensor {name!r} has dtype {tensor.dtype}, and only {', '.join(_SUPPORTED)} are supported; "
      f"{remedy}"
    )


def is_quantized(tensor: Tensor) -> bool:
  """Whether the tensor's numbers are something that weights are packed in."""
  return tensor.dtype not in (*_SUPPORTED, "F64")


def read_into(tensor: Tensor, target: np.ndarray) -> None:
  """Reads a tensor into `target`, of its shape; converts where dtypes differ.

  Raises:
    ValueError: if the file ends too early, which it did not when its header was read.
  """
  dtype = numpy_dtype(tensor.dtype)
  same = dtype == target.dtype
  buffer = target if same else np.empty(tensor.shape, dtype)
  flat = buffer.reshape(-1).view(np.uint8).data
  with tensor.path.open("rb", buffering=0) as file:
    at = 0
    while at < len(flat):
      got = os.preadv(file.fileno(), [flat[at : at + _READ_BYTES]], tensor.start + at)
      if not got:
        raise ValueError(f"{tensor.path} ended while it was read; get it again")
      at += got
  if not same:
    target[...] = buffer
