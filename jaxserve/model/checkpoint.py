"""A model at rest: the `Checkpoint` record and its native format, an Orbax directory.

  DIR/jaxserve.json   everything but the arrays: config, tokenizer, template, where it came from
  DIR/params/         the arrays, by Orbax

The arrays are stored once, uncompressed, in bfloat16 where that is exact and else in float32, and
are cast while they are read. Storing a dequantized SmolLM2-135M (4-bit values, not exact in
bfloat16) a second time in bfloat16 would save 0.3 s of a start-up for 269 MB of disk; compression
halves the disk and doubles the time to restore.
"""

import contextlib
import dataclasses
import json
import logging as std_logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from absl import logging

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.model.lazy_params import LazyParams, Params, num_bytes, shape_of
from jaxserve.model.llama import FLOAT32, param_shapes
from jaxserve.progress import progress

Dtype = Literal["bfloat16", "float32"]

_FORMAT = "jaxserve-checkpoint"
FORMAT_VERSION = 1  # Raise it when converted models change: old ones are then made again.
_METADATA = "jaxserve.json"
_ARRAYS = "params"
_GROUP_BYTES = 1 << 30  # Arrays restored by one Orbax call: one step of the progress bar.
_NUM_NAMES_IN_ERROR = 4


def _some(names: Sequence[str]) -> str:
  more = len(names) - _NUM_NAMES_IN_ERROR
  return ", ".join(names[:_NUM_NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")


def check_params(config: ModelConfig, params: Params) -> None:
  """Raises a ValueError naming the arrays that are missing, unexpected or misshapen."""
  shapes = param_shapes(config)
  if missing := [name for name in shapes if name not in params]:
    raise ValueError(f"weights are missing: {_some(missing)}")
  if extra := [name for name in params if name not in shapes]:
    raise ValueError(f"weights that this model has no place for: {_some(extra)}")
  for name, shape in shapes.items():
    if shape_of(params, name) != shape:
      raise ValueError(f"{name}: its shape is {shape_of(params, name)}, not {shape}")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
  """A model with all that serving it takes. Not changed once made.

  Attributes:
    config: the model's shape.
    params: arrays by flat name, as `param_shapes` lists them.
    tokenizer_json: a serialized `tokenizers` tokenizer; None means bytes are tokens.
    chat_template: a Jinja template, if the model is for chat.
    eos_token_ids: tokens that end a reply.
    bos_token_id: the token that starts a text, if there is one.
    name: for people and for the API's model field.
    source: where it came from: a path, a package or a seed.
  """

  config: ModelConfig
  params: Params
  tokenizer_json: str | None
  chat_template: str | None
  eos_token_ids: tuple[int, ...]
  bos_token_id: int | None
  name: str
  source: str

  def __post_init__(self) -> None:
    check_params(self.config, self.params)

  @property
  def num_bytes(self) -> int:
    """Bytes of all arrays."""
    return num_bytes(self.params)


def numpy_dtype(dtype: Dtype) -> np.dtype:
  """The numpy dtype of a `Dtype`; a ValueError for any other name."""
  if dtype not in ("bfloat16", "float32"):
    raise ValueError(f"dtype={dtype!r}: use 'bfloat16' or 'float32'")
  if dtype == "float32":
    return np.dtype(np.float32)
  import ml_dtypes

  return np.dtype(ml_dtypes.bfloat16)


def array_dtype(name: str, dtype: Dtype) -> np.dtype:
  """The dtype of the array `name` of a model in `dtype`: gains and biases are float32 in any."""
  return numpy_dtype("float32" if name.rsplit(".", 1)[-1] in FLOAT32 else dtype)


def with_dtype(checkpoint: Checkpoint, dtype: Dtype) -> Checkpoint:
  """The checkpoint with its matrices in `dtype`; arrays that have it already are shared."""

  def cast(name: str, array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(array_dtype(name, dtype), copy=False)

  held = checkpoint.params
  if isinstance(held, LazyParams):
    return dataclasses.replace(checkpoint, params=held.map(cast))
  params = {name: cast(name, array) for name, array in held.items()}
  return dataclasses.replace(checkpoint, params=params)


def _is_exact_in_bfloat16(array: np.ndarray) -> bool:
  if array.dtype == numpy_dtype("bfloat16"):
    return True
  bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
  return not np.any(bits & np.uint32(0xFFFF))


def _stored_dtype(params: Params) -> Dtype:
  matrices = (np.asarray(array) for array in params.values() if array.ndim > 1)
  exact = all(map(_is_exact_in_bfloat16, matrices))
  return "bfloat16" if exact else "float32"


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


def save(directory: Path, checkpoint: Checkpoint) -> None:
  """Writes `checkpoint` as a new directory that appears only when it is complete.

  Args:
    directory: where; must not exist. It is made readable by its owner alone.
    checkpoint: what.

  Raises:
    FileExistsError: if `directory` exists, also if another process made it meanwhile.
  """
  import orbax.checkpoint as ocp

  directory = Path(directory).absolute()
  if directory.exists():
    raise FileExistsError(f"{directory} exists; delete it to write a checkpoint there")
  make_private_directory(directory.parent)
  dtype = _stored_dtype(checkpoint.params)
  stored = with_dtype(checkpoint, dtype)
  temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.tmp-", dir=directory.parent))
  try:
    with _quiet_orbax():
      args = ocp.args.PyTreeSave(dict(stored.params))
      with _checkpointer() as checkpointer:
        checkpointer.save(temporary / _ARRAYS, args=args)
    text = json.dumps(_metadata(stored, dtype), ensure_ascii=False, indent=1)
    (temporary / _METADATA).write_text(text, encoding="utf-8")
    _rename_new(temporary, directory)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def _rename_new(temporary: Path, directory: Path) -> None:
  try:
    os.rename(temporary, directory)
  except OSError as error:
    if directory.exists():
      raise FileExistsError(f"{directory} was made by another process meanwhile") from error
    raise


def model_config(fields: Mapping[str, Any]) -> ModelConfig:
  """The inverse of `dataclasses.asdict`, after JSON has made lists of tuples."""

  def frozen(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}

  return ModelConfig(**{**frozen(fields), "rope": RopeConfig(**frozen(fields["rope"]))})


def _metadata(checkpoint: Checkpoint, dtype: Dtype) -> dict[str, Any]:
  fields = {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}
  del fields["params"]
  config = dataclasses.asdict(checkpoint.config)
  return {"format": _FORMAT, "version": FORMAT_VERSION, "dtype": dtype, **fields, "config": config}


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


def _groups(
  shapes: Mapping[str, tuple[int, ...]], itemsize: int
) -> Iterator[tuple[list[str], int]]:
  names: list[str] = []
  num_bytes = 0
  for name, shape in shapes.items():
    names.append(name)
    num_bytes += int(np.prod(shape)) * itemsize
    if num_bytes >= _GROUP_BYTES:
      yield names, num_bytes
      names, num_bytes = [], 0
  if names:
    yield names, num_bytes


def _restore_arrays(
  path: Path, shapes: Mapping[str, tuple[int, ...]], stored: Dtype, dtype: Dtype
) -> dict[str, np.ndarray]:
  import orbax.checkpoint as ocp

  restore_args = {
    name: ocp.RestoreArgs(restore_type=np.ndarray, dtype=array_dtype(name, dtype))
    for name in shapes
  }
  groups = list(_groups(shapes, numpy_dtype(stored).itemsize))
  total = sum(num_bytes for _, num_bytes in groups)
  params: dict[str, np.ndarray] = {}
  with _quiet_orbax(), _checkpointer() as checkpointer, progress(total, "B", "Weights") as bar:
    for names, num_bytes in groups:
      args = ocp.args.PyTreeRestore(
        item=dict.fromkeys(names, 0),
        restore_args={name: restore_args[name] for name in names},
        partial_restore=True,
      )
      params |= checkpointer.restore(path, args=args)
      bar.advance(num_bytes)
  return {name: params[name] for name in shapes}


def restore(directory: Path, dtype: Dtype) -> Checkpoint:
  """Reads a checkpoint that `save` wrote, casting the arrays as they are read.

  Args:
    directory: the checkpoint.
    dtype: of the matrices returned; norm gains are float32.

  Returns:
    The checkpoint, its arrays in host memory.

  Raises:
    ValueError: if the directory is no checkpoint or is damaged, naming it and what to do.
  """
  directory = Path(directory).absolute()
  metadata = _read_metadata(directory)
  try:
    config = model_config(metadata["config"])
    shapes = param_shapes(config)
    params = _restore_arrays(directory / _ARRAYS, shapes, metadata["dtype"], dtype)
    return Checkpoint(
      config=config,
      params=params,
      tokenizer_json=metadata["tokenizer_json"],
      chat_template=metadata["chat_template"],
      eos_token_ids=tuple(metadata["eos_token_ids"]),
      bos_token_id=metadata["bos_token_id"],
      name=metadata["name"],
      source=metadata["source"],
    )
  except (OSError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{directory} is damaged ({type(error).__name__}: {error}); {_remedy(directory)}"
    ) from error
