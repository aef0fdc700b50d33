"""What an engine is built for: model, scheduler, dtypes, buckets."""

import dataclasses
from typing import Literal

from jaxserve import sched
from jaxserve.config import (
  COARSE_FROM,
  ModelConfig,
  PlanShape,
  SchedulerConfig,
  SplitKV,
  token_buckets,
)
from jaxserve.engine.speculation import Speculate, check_draft_model

Attention = Literal["auto", "xla", "ref", "numba", "mosaic_gpu"]

_FEWEST_ROWS, _ROW_FACTOR = 8, 4


def row_buckets(max_num_seqs: int) -> tuple[int, ...]:
  """Row counts that the head is compiled for: 8, 32, 128, ..., the last exactly `max_num_seqs`.

  The head reads all of its weights whatever the rows, so fewer steps than for tokens suffice.
  """
  buckets, size = [max_num_seqs], _FEWEST_ROWS
  while size < max_num_seqs:
    buckets.append(size)
    size *= _ROW_FACTOR
  return tuple(sorted(buckets))


def bucket_for(size: int, buckets: tuple[int, ...]) -> int:
  """The smallest bucket that holds `size`."""
  for bucket in buckets:
    if size <= bucket:
      return bucket
  raise ValueError(f"size={size}: no bucket holds it; the largest is {buckets[-1]}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """Everything that decides what is compiled.

  Attributes:
    model: architecture.
    scheduler: shapes of the scheduler; its max_budget is the last token bucket.
    dtype: of weights, matrix products and KV pages; sums and the residual stream are float32.
    quantize: how the matrices of the layers are stored; see `model.quantize`.
    kv_dtype: of KV pages; "int8" has a scale for every head and token, "auto" is `dtype`.
    attention: implementation of paged attention; "auto": see `engine.attention`, which puts the
      one chosen in its place before anything is compiled.
    token_buckets: token counts that the forward pass is compiled for, rising; None: see
      `token_buckets`.
    query_tile: most queries of one attention work item.
    splits: how decodes are split over work items; None: not, or as "mosaic_gpu" needs it.
    overlap: dispatch a step before the outputs of the one before it are read.
    decode_steps: most steps, of decodes alone, that the device runs without the host between them;
      outputs then come in such bursts, and a new request waits for fewer than twice as many steps.
    eos_token_ids: end-of-sequence tokens.
    other_policies: scheduling policies besides scheduler.policy that `Engine.set_policy` may
      switch to.
    score_prompts: compile what scores the tokens of prompts too.
    speculate: the drafter; None: no speculative decoding. scheduler.max_drafts is its k.
    draft_model: architecture of the model that drafts, where the drafter is one.
  """

  model: ModelConfig
  scheduler: SchedulerConfig
  dtype: Literal["bfloat16", "float32"] = "bfloat16"
  quantize: Literal["none", "int8", "int4"] = "none"
  kv_dtype: Literal["auto", "int8"] = "auto"
  attention: Attention = "auto"
  token_buckets: tuple[int, ...] | None = None
  query_tile: int = 512
  splits: SplitKV | None = None
  overlap: bool = True
  decode_steps: int = 1
  eos_token_ids: tuple[int, ...] = ()
  other_policies: tuple[str, ...] = ()
  score_prompts: bool = False
  speculate: Speculate | None = None
  draft_model: ModelConfig | None = None

  def __post_init__(self) -> None:
    check_draft_model(self.speculate, self.draft_model, self.model, self.scheduler)
    if self.decode_steps < 1:
      raise ValueError(f"decode_steps={self.decode_steps}: must be at least 1")
    if self.decode_steps > 1 and self.speculate:
      raise ValueError(
        f"decode_steps={self.decode_steps}: drafts need the host after every step; leave out "
        "speculate, or decode_steps"
      )
    if self.scheduler.max_model_len > self.model.max_position:
      raise ValueError(
        f"max_model_len={self.scheduler.max_model_len}: the model supports at most "
        f"{self.model.max_position} tokens"
      )
    if self.token_buckets is not None and self.token_buckets[-1] != self.scheduler.max_budget:
      raise ValueError(
        f"token_buckets={self.token_buckets}: the last must be max_budget="
        f"{self.scheduler.max_budget}"
      )

  @property
  def page_dtype(self) -> str:
    """What KV pages hold, the storage of bfloat16 as bits aside."""
    return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

  @property
  def buckets(self) -> tuple[int, ...]:
    """Token buckets in use, rising."""
    return self.token_buckets or token_buckets(self.scheduler.max_budget)

  @property
  def layouts(self) -> tuple[int, ...]:
    """Token counts that `lay_out` is compiled for; plans are cut to their bucket on the host.

    Steps of decodes alone get a small one, since their layout is on the critical path.
    """
    small = [bucket for bucket in self.buckets if bucket <= COARSE_FROM]
    return tuple(sorted({small[-1] if small else self.buckets[0], self.buckets[-1]}))

  @property
  def decode_buckets(self) -> tuple[int, ...]:
    """Token buckets of loops of decodes, rising: for one row, and for every row bucket."""
    seats = min(self.scheduler.max_num_seqs, self.scheduler.max_budget)
    return tuple(sorted({bucket_for(min(rows, seats), self.buckets) for rows in (1, *self.rows)}))

  @property
  def rows(self) -> tuple[int, ...]:
    """Row buckets of the head, rising; with speculation a draft is a row of its own."""
    most = self.scheduler.max_num_seqs * (1 + self.scheduler.max_drafts)
    return row_buckets(min(most, self.scheduler.max_budget))

  @property
  def schedulers(self) -> tuple[SchedulerConfig, ...]:
    """The scheduler under every policy there may be, the one to start with first.

    Those that do not go with a prefix cache are without one.
    """
    others = (p for p in dict.fromkeys(self.other_policies) if p != self.scheduler.policy)
    return self.scheduler, *map(self._under, others)

  def _under(self, policy: str) -> SchedulerConfig:
    cached = self.scheduler.prefix_cache and not sched.find_policy(policy).no_prefix_cache
    return dataclasses.replace(self.scheduler, policy=policy, prefix_cache=cached)

  def plan_shape(self, bucket: int) -> PlanShape:
    """Shape of the plans of a token bucket."""
    return PlanShape.of(self.scheduler, bucket, self.query_tile, self.splits)
