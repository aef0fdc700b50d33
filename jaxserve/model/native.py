"""The native format: a checkpoint converted once, in arrays of Orbax.

  DIR/jaxserve.json   everything but the arrays: config, tokenizer, template, where it came from,
                      and dtype and checksum of every array
  DIR/params/0, ...   the arrays, by Orbax, in groups of some 100 MB

Arrays are written group by group, so converting never holds more than a group, and restored group
by group, each in parallel, so loading holds no model twice. They are stored uncompressed, in
bfloat16 where that is exact, and are cast while they are read. Storing a dequantized SmolLM2-135M
(4-bit values, not exact in bfloat16) a second time in bfloat16 would save 0.3 s of a start-up for
269 MB of disk; compression halves the disk and doubles the time to restore.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import json
import logging as std_logging
import math
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.model.checkpoint import Checkpoint, Dtype, array_dtype, numpy_dtype
from jaxserve.model.lazy_params import LazyParams
from jaxserve.model.llama import param_shapes
from jaxserve.progress import progress

_FORMAT = "jaxserve-checkpoint"
FORMAT_VERSION = 2  # Raise it when converted models change: old ones are then made again.
_METADATA = "jaxserve.json"
_ARRAYS = "params"
_GROUP_BYTES = 1 << 27
_THREADS = 4


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
  """Keeps Orbax's running commentary (tens of INFO lines a call) out of the user's log."""

  def keep(record: std_logging.LogRecord) -> bool:
    return record.levelno >= std_logging.ERROR or "orbax" not in record.pathname

  logger = logging.get_absl_logger()
  logger.addFilter(keep)
  try:
    yield
  finally:
    logger.removeFilter(keep)


def _checkpointer() -> Any:
  import orbax.checkpoint as ocp

  handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
  return ocp.Checkpointer(handler)


def make_private_directory(directory: Path) -> None:
  """Makes `directory` and the parents it lacks, each readable by its owner alone."""
  missing = [path for path in (directory, *directory.parents) if not path.exists()]
  for path in reversed(missing):
    path.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
  """A folder beside `directory` to write into, gone afterwards.

  Whoever writes holds a lock on it, so that folders of killed processes are known and removed.
  """
  prefix = f".{directory.name}.tmp-"
  for left in directory.parent.glob(f"{prefix}*"):
    with contextlib.suppress(OSError), _locked(left):
      logging.info("Removing %s, which an interrupted conversion left", left)
      shutil.rmtree(left)
  scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
  with _locked(scratch):
    try:
      yield scratch
    finally:
      shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
  """Holds the lock of a folder; an OSError where another process does."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield
  finally:
    os.close(descriptor)


def save(
  directory: Path, checkpoint: Checkpoint, provenance: Mapping[str, Any] | None = None
) -> None:
  """Writes `checkpoint` as a new directory that appears only when it is complete.

  Args:
    directory: where; must not exist. It is made readable by its owner alone.
    checkpoint: what.
    provenance: kept in its metadata, for people.

  Raises:
    FileExistsError: if `directory` exists, also if another process made it meanwhile.
  """
  directory = Path(directory).absolute()
  if directory.exists():
    raise FileExistsError(f"{directory} exists; delete it to write a checkpoint there")
  make_private_directory(directory.parent)
  with _scratch(directory) as scratch:
    arrays = _save_arrays(scratch / _ARRAYS, checkpoint)
    metadata = _metadata(checkpoint, arrays, provenance or {})
    text = json.dumps(metadata, ensure_ascii=False, indent=1)
    (scratch / _METADATA).write_text(text, encoding="utf-8")
    _rename_new(scratch, directory)


def _rename_new(temporary: Path, directory: Path) -> None:
  try:
    os.rename(temporary, directory)
  except OSError as error:
    if directory.exists():
      raise FileExistsError(f"{directory} was made by another process meanwhile") from error
    raise


def _as_stored(array: Any) -> np.ndarray:
  """In bfloat16 where that loses nothing, else as it is."""
  array = np.asarray(array)
  if array.dtype != np.float32 or array.ndim < 2:
    return array
  bits = np.ascontiguousarray(array).view(np.uint32)
  inexact = np.any(bits & np.uint32(0xFFFF))
  return array if inexact else array.astype(numpy_dtype("bfloat16"))


def checksum(array: np.ndarray) -> int:
  """CRC-32 of an array's bytes."""
  return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _save_arrays(folder: Path, checkpoint: Checkpoint) -> list[dict[str, Any]]:
  """Writes the arrays in groups; for each group dtype and checksum of its arrays by name."""
  import orbax.checkpoint as ocp

  params = checkpoint.params
  described: list[dict[str, Any]] = []
  groups = list(_groups(param_shapes(checkpoint.config), _GROUP_BYTES))
  folder.mkdir()
  with (
    _quiet_orbax(),
    _checkpointer() as checkpointer,
    concurrent.futures.ThreadPoolExecutor(_THREADS) as pool,
    progress(len(param_shapes(checkpoint.config)), "arrays", "Converting") as bar,
  ):
    for number, names in enumerate(groups):
      read = pool.map(lambda name: _as_stored(params[name]), names)
      group = dict(zip(names, read, strict=True))
      sums = pool.map(checksum, group.values())
      described.append(
        {
          name: {"dtype": array.dtype.name, "crc32": crc}
          for (name, array), crc in zip(group.items(), sums, strict=True)
        }
      )
      checkpointer.save(folder / str(number), args=ocp.args.PyTreeSave(group))
      bar.advance(len(names))
  return described


def _groups(shapes: Mapping[str, tuple[int, ...]], most: int) -> Iterator[list[str]]:
  """Names in groups of about `most` bytes in float32."""
  names: list[str] = []
  size = 0
  for name, shape in shapes.items():
    names.append(name)
    size += int(np.prod(shape)) * 4
    if size >= most:
      yield names
      names, size = [], 0
  if names:
    yield names


def _metadata(
  checkpoint: Checkpoint, arrays: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]
) -> dict[str, Any]:
  fields = {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}
  del fields["params"]
  config = dataclasses.asdict(checkpoint.config)
  head = {"format": _FORMAT, "version": FORMAT_VERSION, **fields, "config": config}
  return {**head, "provenance": dict(provenance), "arrays": list(arrays)}


def model_config(fields: Mapping[str, Any]) -> ModelConfig:
  """The inverse of `dataclasses.asdict`, after JSON has made lists of tuples."""

  def frozen(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}

  return ModelConfig(**{**frozen(fields), "rope": RopeConfig(**frozen(fields["rope"]))})


def is_checkpoint(directory: Path) -> bool:
  """Whether `directory` is in the native format."""
  return (Path(directory) / _METADATA).is_file()


def _read_metadata(directory: Path) -> dict[str, Any]:
  path = directory / _METADATA
  try:
    metadata = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise ValueError(
      f"{directory} is not a jaxserve checkpoint: {error.strerror}: {path}"
    ) from None
  except ValueError as error:
    raise ValueError(f"{path} is damaged ({error}); {_remedy(directory)}") from None
  found = (metadata.get("format"), metadata.get("version"))
  if found != (_FORMAT, FORMAT_VERSION):
    raise ValueError(
      f"{path}: format {found} is not {(_FORMAT, FORMAT_VERSION)}, which this version reads; "
      f"{_remedy(directory)}"
    )
  return metadata


def _remedy(directory: Path) -> str:
  return f"delete {directory} and convert the model again"


def _checked(name: str, array: np.ndarray, wanted: Mapping[str, Any], dtype: Dtype) -> np.ndarray:
  """The array in the dtype asked for, if it is the one that was written."""
  if (array.dtype.name, checksum(array)) != (wanted["dtype"], wanted["crc32"]):
    raise ValueError(f"{name}: its bytes are not those that were written")
  return array.astype(array_dtype(name, dtype), copy=False)


class _Groups:
  """The arrays of a checkpoint, restored a group at a time when one of its arrays is asked for.

  An array is handed out once and forgotten; what of its group has not been asked for yet is kept.
  """

  def __init__(self, directory: Path, groups: Sequence[Mapping[str, Any]], dtype: Dtype):
    self._directory, self._groups, self._dtype = directory, groups, dtype
    self._number = {name: number for number, group in enumerate(groups) for name in group}
    self._held: list[dict[str, np.ndarray]] = [{} for _ in groups]
    self._locks = [threading.Lock() for _ in groups]

  def read(self, name: str) -> np.ndarray:
    """The array; a ValueError with a remedy if its group is damaged."""
    number = self._number[name]
    with self._locks[number]:
      if name not in self._held[number]:
        with _damage(self._directory):
          self._held[number] = self._restore(number)
      return self._held[number].pop(name)

  def _restore(self, number: int) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    wanted = self._groups[number]
    args = ocp.args.PyTreeRestore(
      item=dict.fromkeys(wanted, 0),
      restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted},
    )
    with _quiet_orbax(), _checkpointer() as checkpointer:
      group = checkpointer.restore(self._directory / _ARRAYS / str(number), args=args)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      names = list(group)
      checked = pool.map(lambda n: _checked(n, group.pop(n), wanted[n], self._dtype), names)
      return dict(zip(names, checked, strict=True))


@contextlib.contextmanager
def _damage(directory: Path) -> Iterator[None]:
  """Whatever goes wrong inside is told as damage to `directory`, with the remedy."""
  try:
    yield
  except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
    raise ValueError(
      f"{directory} is damaged ({type(error).__name__}: {error}); {_remedy(directory)}"
    ) from error


def restore(directory: Path, dtype: Dtype) -> Checkpoint:
  """Opens a checkpoint that `save` wrote.

  Args:
    directory: the checkpoint.
    dtype: of the matrices; gains and biases are float32.

  Returns:
    The checkpoint. Its arrays are read, verified and cast when they are asked for, and only then
    may be found damaged, with the same error.

  Raises:
    ValueError: if the directory is no checkpoint or is damaged, naming it and what to do.
  """
  directory = Path(directory).absolute()
  metadata = _read_metadata(directory)
  with _damage(directory):
    config = model_config(metadata["config"])
    groups = metadata["arrays"]
    shapes = param_shapes(config)
    stored = {name: np.dtype(_dtype(a["dtype"])) for group in groups for name, a in group.items()}
    if set(stored) != set(shapes):
      raise ValueError("its list of arrays is not that of the model")
    total = sum(math.prod(shape) * stored[name].itemsize for name, shape in shapes.items())
    return Checkpoint(
      config=config,
      params=LazyParams(shapes, _Groups(directory, groups, dtype).read, total),
      tokenizer_json=metadata["tokenizer_json"],
      chat_template=metadata["chat_template"],
      eos_token_ids=tuple(metadata["eos_token_ids"]),
      bos_token_id=metadata["bos_token_id"],
      name=metadata["name"],
      source=metadata["source"],
    )


def _dtype(name: str) -> np.dtype:
  return numpy_dtype("bfloat16") if name == "bfloat16" else np.dtype(name)
