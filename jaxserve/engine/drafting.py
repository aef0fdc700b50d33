"""The draft model of an engine: its weights, its pages, its executables."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxserve.config import ModelConfig
from jaxserve.engine import attention
from jaxserve.engine.config import EngineConfig
from jaxserve.engine.devices import Devices
from jaxserve.engine.executables import ExecutableTable
from jaxserve.engine.programs import ModelState, Program
from jaxserve.engine.speculation import Speculate
from jaxserve.model import draft, llama, source
from jaxserve.model import step as model_step
from jaxserve.model.checkpoint import Checkpoint, Dtype
from jaxserve.model.kv_cache import init_kv
from jaxserve.types import StepOutput
from jaxserve.types.plan import packed_size
from pallas_kernels.ragged_paged_attention import Implementation


class Weights(NamedTuple):
  """A model as `llama.load` gives it."""

  graphdef: nnx.GraphDef
  leaves: tuple[jax.Array, ...]


class Loaded(NamedTuple):
  """A draft model and its architecture."""

  config: ModelConfig
  weights: Weights


def load(
  speculate: Speculate | None, target: Checkpoint, cache_dir: pathlib.Path, dtype: Dtype
) -> Loaded | None:
  """The model that `speculate` names; None where it names none.

  Raises:
    ValueError: it cannot be loaded, or its tokens are not those of `target`.
  """
  if speculate is None or speculate.model is None:
    return None
  draft = source.load_checkpoint(speculate.model, cache_dir, dtype)
  if _vocabulary(draft) != _vocabulary(target):
    raise ValueError(
      f"speculate: the tokens of {draft.name} are not those of {target.name}; drafts need a "
      "smaller model with the same tokenizer"
    )
  graphdef, leaves = llama.load(draft.config, draft.params, jnp.dtype(dtype))
  return Loaded(draft.config, Weights(graphdef, leaves))


def _vocabulary(checkpoint: Checkpoint) -> Any:
  size, text = checkpoint.config.vocab_size, checkpoint.tokenizer_json
  return size, json.loads(text)["model"].get("vocab") if text else None


def _attention(config: EngineConfig, model: ModelConfig, device: jax.Device) -> Implementation:
  """That of the large model, unless the device cannot do it for the small one."""
  assert config.attention != "auto"
  if config.attention != "mosaic_gpu":
    return config.attention
  target, page_size = attention.describe(device), config.scheduler.cache.page_size
  return attention.choose("auto", target, model, page_size, config.dtype).implementation


def programs(config: EngineConfig, weights: Weights, devices: Devices) -> Iterator[Program]:
  """`follow` for every token bucket, `draft` for every number of rows that the head may have."""
  model, scheduler = config.draft_model, config.scheduler
  assert model is not None
  sharding = SingleDeviceSharding(devices.model)
  here = lambda tree: jax.tree.map(  # noqa: E731
    lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding), tree
  )
  platform, dtype = devices.model.platform, jnp.dtype(config.dtype)
  kv = here(jax.eval_shape(lambda: init_kv(model, scheduler.cache, dtype, platform)))
  tokens = here(np.zeros((scheduler.max_requests, scheduler.max_model_len), np.int32))
  fixed: dict[str, Any] = dict(
    graphdef=weights.graphdef, config=model, dtype=dtype, unroll=platform == "gpu",
    attention=_attention(config, model, devices.model),
  )  # fmt: skip
  options, leaves = model_step.compiler_options(platform), here(weights.leaves)
  for bucket in reversed(config.buckets):
    shape = config.plan_shape(bucket)
    yield Program(
      key=("follow", bucket), fn=functools.partial(_follow, shape=shape, **fixed),
      args=(leaves, kv, tokens, here(np.zeros(packed_size(shape), np.int32))), donate=(1,),
      compiler_options=options,
    )  # fmt: skip
  shape = config.plan_shape(config.buckets[0])
  plan = here(np.zeros(packed_size(shape), np.int32))
  for rows in sorted({min(rows, scheduler.max_num_seqs) for rows in config.rows}):
    row = here(np.zeros(rows, np.int32))
    yield Program(
      key=("draft", rows), fn=functools.partial(draft.propose, shape=shape, **fixed),
      args=(leaves, kv, tokens, plan, row, row), donate=(1, 2), compiler_options=options,
    )  # fmt: skip


def _follow(leaves: Any, kv: Any, tokens: Any, plan: Any, **fixed: Any) -> Any:
  """The cache after the plan; what the model would say of it is not asked."""
  return model_step.forward(leaves, kv, tokens, plan, **fixed)[1]


class DraftModel:
  """Keeps the draft model in step with the large one, and asks it for drafts."""

  def __init__(self, config: EngineConfig, weights: Weights, table: ExecutableTable, platform: str):
    assert config.draft_model is not None
    self._table, self._leaves = table, weights.leaves
    self.kv = init_kv(config.draft_model, config.scheduler.cache, jnp.dtype(config.dtype), platform)

  @property
  def kv_bytes(self) -> int:
    """Size of its pool."""
    return sum(x.nbytes for x in jax.tree.leaves(self.kv))

  def after(
    self, bucket: int, plan: np.ndarray, rows: np.ndarray, model: ModelState,
    output: StepOutput | None,
  ) -> StepOutput | None:  # fmt: skip
    """Computes what the large model has just been told to, then drafts behind its outputs.

    Args:
      bucket: of the step.
      plan: of the step.
      rows: the same plan in the shape of the smallest bucket.
      model: its token table is donated and replaced.
      output: of the step; None where no row samples.

    Returns:
      The output with the number of new drafts.
    """
    self.kv = self._table["follow", bucket](self._leaves, self.kv, model.token_table, plan)
    if output is None or output.owner is None:
      return output
    self.kv, model.token_table, proposed = self._table["draft", output.owner.shape[0]](
      self._leaves, self.kv, model.token_table, rows, output.owner, output.ends
    )
    return dataclasses.replace(output, proposed=proposed)
