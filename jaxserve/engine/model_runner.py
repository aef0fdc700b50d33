"""The model's device: weights, what lives there between steps, and the programs that use it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.engine import constraints, programs, prompt_scores
from jaxserve.engine.config import EngineConfig, bucket_for
from jaxserve.engine.drafting import DraftModel
from jaxserve.engine.executables import ExecutableTable
from jaxserve.engine.planner import Decided
from jaxserve.engine.request import Request, Scheduled
from jaxserve.engine.sampling_row import sampling_row
from jaxserve.types import StepOutput


class Dispatched(NamedTuple):
  """What a step will have computed; every array may still be on its way.

  Attributes:
    done: ready when the forward pass is; of several steps, how many were run.
    output: None where no row samples; of several steps with a leading axis.
    scores: of prompt tokens.
  """

  done: jax.Array
  output: StepOutput | None
  scores: tuple[prompt_scores.Part, ...]


class ModelRunner:
  """Runs plans; every call returns at once."""

  def __init__(
    self,
    config: EngineConfig,
    leaves: tuple[jax.Array, ...],
    table: ExecutableTable,
    device: jax.Device,
    draft: DraftModel | None,
  ):
    self._config, self._leaves, self._table, self._device = config, leaves, table, device
    self._draft = draft
    self._state = programs.ModelState(**table["empty",](np.int32(0)))

  @property
  def kv_bytes(self) -> int:
    """Size of the KV pool, that of a draft model left out."""
    return sum(x.nbytes for x in jax.tree.leaves(self._state.kv))

  def upload(self, request: Request) -> None:
    """Writes the prompt and the options of a request at its slot."""
    prompt = request.prompt
    tokens = np.zeros(self._config.scheduler.max_model_len, np.int32)
    tokens[: len(prompt)] = prompt
    row = sampling_row(
      request.sampling, self._config.model.vocab_size, len(prompt), sorted(request.stop_ids),
      request.constraint is not None,
    )  # fmt: skip
    state = self._state
    state.token_table, state.sampling = self._table["upload",](
      state.token_table, state.sampling, np.int32(request.slot), tokens, row
    )

  def dispatch(
    self, decided: Decided, rows: Sequence[Sequence[tuple[Request, Scheduled]]]
  ) -> Dispatched:
    """Runs what was decided, and after it whatever its requests ask for besides.

    Args:
      decided: with tokens.
      rows: of each step, in order.
    """
    bucket, plan = decided.bucket, decided.plan
    assert plan is not None
    if len(rows) > 1:
      return self.decode_steps(plan, len(rows), bucket)
    self._state.sampling = constraints.apply(
      self._table, self._state.sampling, rows[0], self._config.scheduler.max_num_seqs
    )
    places = len(rows[0])
    if self._config.speculate:
      places += sum(part.drafts for _, part in rows[0])
    samples = any(part.samples for _, part in rows[0])
    done, output, hidden = self.run(plan, decided.small_plan, bucket, places, samples)
    scores = prompt_scores.dispatch(
      self._table, self._leaves, hidden, bucket, rows[0], self._device
    )
    return Dispatched(done, output, scores)

  def run(
    self, plan: np.ndarray, small_plan: np.ndarray | None, bucket: int, num_places: int,
    any_samples: bool,
  ) -> tuple[jax.Array, StepOutput | None, jax.Array]:  # fmt: skip
    """Forward pass, head and drafts: (ready when the first is, output, hidden states of all)."""
    state = self._state
    hidden, state.kv, row_fields, every = self._table["forward", bucket](
      self._leaves, state.kv, state.token_table, plan
    )
    output = None
    if any_samples:
      rows = bucket_for(num_places, self._config.rows)
      state.token_table, output = self._table["sample", rows](
        self._leaves, hidden, state.token_table, state.sampling, row_fields
      )
    if self._draft:
      assert small_plan is not None
      output = self._draft.after(bucket, plan, small_plan, state, output)
    self._send_to_host(output)
    return row_fields, output, every

  def decode_steps(self, plans: np.ndarray, count: int, bucket: int) -> Dispatched:
    """Runs the first `count` plans, packed, of steps of decodes; output has one row for each."""
    state = self._state
    state.kv, state.token_table, output, number = self._table["decode_steps", bucket](
      self._leaves, state.kv, state.token_table, state.sampling, plans, np.int32(count)
    )
    self._send_to_host((output, number))
    return Dispatched(number, output, ())

  def _send_to_host(self, arrays: Any) -> None:
    if self._device.platform == "cpu":
      return  # they are there
    for array in jax.tree.leaves(arrays):
      array.copy_to_host_async()

  def wait(self) -> None:
    """Blocks until everything dispatched so far is done."""
    jax.block_until_ready((self._state.kv, self._state.token_table))
