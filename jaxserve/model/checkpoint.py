"""A model at rest: the `Checkpoint` record, whatever file it comes from."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.model.lazy_params import LazyParams, Params, num_bytes, shape_of
from jaxserve.model.llama import FLOAT32, param_shapes

Dtype = Literal["bfloat16", "float32"]

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
