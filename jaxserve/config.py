"""Static configuration: frozen, hashable, validated when made. Never a pytree, never changed."""

import dataclasses
import typing
from collections.abc import Hashable
from typing import Literal

Ordering = Literal["fcfs", "priority"]
Reserve = Literal["growth", "gate", "none"]
RopeKind = Literal["default", "linear", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "gelu_tanh"]

# The matrices of a layer, which may have biases.
MATRICES = ("qkv", "o", "gate_up", "down")
# Token buckets below COARSE_FROM, the first of the coarse grid.
SMALL_BUCKETS = (1, 4, 8, 12, 16, 24, 32)
COARSE_FROM = 64


def _require(ok: bool, field: str, value: object, remedy: str) -> None:
  if not ok:
    raise ValueError(f"{field}={value!r}: {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary position embedding and how it is stretched beyond the context of training.

  Attributes:
    theta: base of the frequencies.
    kind: "default": not stretched; "linear": all frequencies divided by `factor`; "llama3": the low
      ones (Llama 3.1 model card); "yarn": by a ramp over channels (Peng et al. 2023); "longrope":
      each by its own factor (Ding et al. 2024).
    factor: how much frequencies are divided by ("linear", "llama3", "yarn").
    low_freq_factor: wavelengths above original_max_position / low_freq_factor are divided
      ("llama3").
    high_freq_factor: wavelengths below original_max_position / high_freq_factor are kept
      ("llama3").
    original_max_position: tokens of context the model was trained with before stretching.
    beta_fast: channels that turn more often than this over the original context are kept ("yarn").
    beta_slow: channels that turn less often than this are divided ("yarn").
    truncate: the ramp begins and ends at whole channels ("yarn").
    attention_scale: cosines and sines are multiplied by it ("yarn", "longrope").
    short_factor: divisor of each of the D/2 frequencies while the context served is at most
      original_max_position ("longrope").
    long_factor: the same for longer ones.
  """

  theta: float = 10_000.0
  kind: RopeKind = "default"
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position: int = 8192
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  attention_scale: float = 1.0
  short_factor: tuple[float, ...] = ()
  long_factor: tuple[float, ...] = ()

  def __post_init__(self) -> None:
    kinds = typing.get_args(RopeKind)
    _require(self.kind in kinds, "kind", self.kind, f"use one of {', '.join(kinds)}")
    for field in ("theta", "factor", "original_max_position", "attention_scale", "beta_slow"):
      _require(getattr(self, field) > 0, field, getattr(self, field), "must be positive")
    _require(
      self.high_freq_factor > self.low_freq_factor,
      "high_freq_factor",
      self.high_freq_factor,
      f"must exceed low_freq_factor={self.low_freq_factor}",
    )
    _require(
      self.beta_fast > self.beta_slow,
      "beta_fast",
      self.beta_fast,
      f"must exceed beta_slow={self.beta_slow}",
    )
    for field in ("short_factor", "long_factor"):
      factors = getattr(self, field)
      _require(all(f > 0 for f in factors), field, factors, "must be positive")
      _require(
        self.kind != "longrope" or bool(factors), field, factors, "longrope needs a list of factors"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A decoder of the Llama family.

  Attributes:
    vocab_size: V.
    hidden_size: width of the residual stream.
    intermediate_size: width of the gated MLP.
    num_layers: L.
    num_heads: Hq query heads.
    num_kv_heads: Hkv key-value heads; divides num_heads.
    head_dim: D; explicit, because it need not be hidden_size / num_heads.
    rope: rotary embedding.
    rms_norm_eps: epsilon of RMSNorm.
    tie_word_embeddings: the head reuses the embedding matrix.
    max_position: longest context the model supports, in tokens.
    is_encoder_decoder: attention is not causal over the prompt; see `SchedulerConfig`.
    biases: which of "qkv", "o", "gate_up" and "down" add a bias (Qwen2: "qkv").
    qk_norm: queries and keys are normalised, head by head, before they are rotated (Qwen3).
    sliding_window: a token sees so many tokens, itself included; None: all before it.
    full_layers: layers that the window does not hold for.
    activation: of the gate.
    embed_scale: embeddings are multiplied by it (Gemma).
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope: RopeConfig = RopeConfig()
  rms_norm_eps: float = 1e-5
  tie_word_embeddings: bool = False
  max_position: int = 8192
  is_encoder_decoder: bool = False
  biases: tuple[str, ...] = ()
  qk_norm: bool = False
  sliding_window: int | None = None
  full_layers: tuple[int, ...] = ()
  activation: Activation = "silu"
  embed_scale: float = 1.0

  def __post_init__(self) -> None:
    for field in (
      "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
      "num_kv_heads", "head_dim", "max_position",
    ):  # fmt: skip
      _require(getattr(self, field) >= 1, field, getattr(self, field), "must be at least 1")
    _require(
      self.num_heads % self.num_kv_heads == 0,
      "num_kv_heads",
      self.num_kv_heads,
      f"must divide num_heads={self.num_heads}",
    )
    _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "must be even for RoPE")
    _require(set(self.biases) <= set(MATRICES), "biases", self.biases, f"use some of {MATRICES}")
    _require(
      self.sliding_window is None or self.sliding_window >= 1,
      "sliding_window",
      self.sliding_window,
      "must be at least 1, or None",
    )
    _require(
      all(0 <= layer < self.num_layers for layer in self.full_layers),
      "full_layers",
      self.full_layers,
      f"must be layers below num_layers={self.num_layers}",
    )
    _require(
      self.activation in typing.get_args(Activation), "activation", self.activation,
      f"use one of {', '.join(typing.get_args(Activation))}",
    )  # fmt: skip
    for field in ("short_factor", "long_factor"):
      factors = getattr(self.rope, field)
      _require(
        len(factors) in (0, self.head_dim // 2),
        field,
        factors,
        f"must have head_dim / 2 = {self.head_dim // 2} numbers",
      )

  @property
  def num_params(self) -> int:
    """Parameters, counted once where tied."""
    q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
    layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size + 2)
    rows = {
      "qkv": q + 2 * kv, "o": self.hidden_size, "gate_up": 2 * self.intermediate_size,
      "down": self.hidden_size,
    }  # fmt: skip
    layer += sum(rows[name] for name in self.biases) + 2 * self.head_dim * self.qk_norm
    embed = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
    return embed + self.num_layers * layer + self.hidden_size

  @property
  def mixes_windows(self) -> bool:
    """Whether some layers have the window and others do not."""
    return self.sliding_window is not None and 0 < len(set(self.full_layers)) < self.num_layers

  def window(self, layer: int) -> int | None:
    """The sliding window of `layer`; None: it sees all tokens."""
    return None if layer in self.full_layers else self.sliding_window

  def for_context(self, longest: int) -> "ModelConfig":
    """The model when no request is longer than `longest` tokens.

    It only matters to "longrope": which of its two lists of factors applies is decided here, once,
    since keys that were cached under one list cannot be read under the other.
    """
    if self.rope.kind != "longrope":
      return self
    return dataclasses.replace(self, max_position=min(self.max_position, longest))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
  """The paged KV cache.

  Attributes:
    num_pages: N pages in the pool.
    page_size: S tokens a page.
  """

  num_pages: int
  page_size: int = 64

  def __post_init__(self) -> None:
    _require(self.num_pages >= 1, "num_pages", self.num_pages, "must be at least 1")
    _require(self.page_size >= 1, "page_size", self.page_size, "must be at least 1")

  @property
  def num_slots(self) -> int:
    """Token slots in the pool, N * S."""
    return self.num_pages * self.page_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
  """Shapes and structure of the scheduler. What may be swept is in `types.SchedulerParams`.

  Attributes:
    cache: page pool.
    max_num_seqs: R, most requests running at once, and rows of a plan.
    max_requests: Q, most requests accepted at once, running and waiting; bounds the queue.
    max_budget: largest token budget that `SchedulerParams.budget` may take; the last bucket.
    max_model_len: most tokens of one request, prompt and output together.
    ordering: "fcfs", or "priority": (priority, arrival) orders both service and victims.
    reserve: what admission keeps free. "growth": the pages that prompts already admitted still
      need, and the newcomer's own whole prompt. "gate": the newcomer's whole prompt, checked at
      that moment only (vLLM's `scheduler_reserve_full_isl`). "none": its first chunk.
    policy: a name in `jaxserve.sched.POLICIES`, or a `Policy` of your own.
    prefix_cache: pages remember what they hold, and newcomers that begin alike share them.
    recompute_last_page: an aligned prompt that is cached whole computes its last page again, as
      vLLM does, instead of its last token only.
    max_drafts: K, most draft tokens of one request in a step; 0: no speculative decoding.
  """

  cache: CacheConfig
  max_num_seqs: int
  max_requests: int
  max_budget: int
  max_model_len: int
  ordering: Ordering = "fcfs"
  reserve: Reserve = "growth"
  policy: Hashable = "vllm_v1"
  prefix_cache: bool = False
  recompute_last_page: bool = False
  max_drafts: int = 0

  def __post_init__(self) -> None:
    for field in ("max_num_seqs", "max_requests", "max_budget", "max_model_len"):
      _require(getattr(self, field) >= 1, field, getattr(self, field), "must be at least 1")
    _require(
      0 <= self.max_drafts < self.max_model_len, "max_drafts", self.max_drafts,
      f"must be in [0, max_model_len={self.max_model_len}); 0 turns speculation off",
    )  # fmt: skip
    _require(
      self.max_requests >= self.max_num_seqs,
      "max_requests",
      self.max_requests,
      f"must be at least max_num_seqs={self.max_num_seqs}",
    )
    _require(
      self.max_budget >= self.max_num_seqs,
      "max_budget",
      self.max_budget,
      f"must be at least max_num_seqs={self.max_num_seqs}: every decoding request takes one token",
    )
    _require(self.ordering in ("fcfs", "priority"), "ordering", self.ordering, "fcfs or priority")
    _require(
      self.reserve in ("growth", "gate", "none"), "reserve", self.reserve, "growth, gate or none"
    )

  @property
  def pages_per_request(self) -> int:
    """M: most pages that one request can hold."""
    return -(-self.max_model_len // self.cache.page_size)


def token_buckets(*budgets: int, others: tuple[int, ...] = ()) -> tuple[int, ...]:
  """The bucket table: a few small ones, a coarse grid, and finer steps up to a budget.

  Small: decodes alone (`SMALL_BUCKETS`). Coarse: 64, 96, 128, 192, 256, ..., so padding is a third
  at most. Fine: the upper half of every budget in eighths of it, since steps with a chunk are
  nearly that full. The last bucket is the largest budget itself and never the next of a grid:
  padding past it would compute tokens that no step can hold.

  Args:
    *budgets: token budgets that steps are meant to fill.
    others: budgets that must have a bucket too, without the finer steps below it.
  """
  largest, size = max(*budgets, *others, 0), COARSE_FROM
  buckets = {*budgets, *others, *(small for small in SMALL_BUCKETS if small < largest)}
  for budget in budgets:
    step = -(-budget // (8 * COARSE_FROM)) * COARSE_FROM
    buckets.update(n for n in range(step, budget, step) if 2 * n >= budget)
  while size < largest:
    if not any(8 * COARSE_FROM < budget <= 2 * size < 2 * budget for budget in budgets):
      buckets.add(size)
    # A power of two is followed by its 1.5 fold, that by the next power of two.
    size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
  return tuple(sorted(buckets))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetDescription:
  """What the layout of attention work must know of an accelerator.

  Attributes:
    num_sms: streaming multiprocessors.
    waves: how many blocks of the decode kernel each should get; one runs at a time, and the more
      there are, the less is lost in a last wave that is partly filled.
  """

  num_sms: int
  waves: int = 3

  def __post_init__(self) -> None:
    for field in ("num_sms", "waves"):
      _require(getattr(self, field) >= 1, field, getattr(self, field), "must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitKV:
  """How the keys of decodes are split over attention work items; see `sched.split_kv`.

  Attributes:
    capacity: items that occupy the device once; a step has at most so many more than decodes.
    tile: keys that the decode kernel takes at once; an item begins at a multiple of it.
    min_keys: fewest keys of an item that is not the last of its row; a multiple of `tile`.
  """

  capacity: int
  tile: int = 128
  min_keys: int = 128

  def __post_init__(self) -> None:
    _require(self.capacity >= 1, "capacity", self.capacity, "must be at least 1")
    _require(self.tile >= 1, "tile", self.tile, "must be at least 1")
    _require(
      self.min_keys >= self.tile and self.min_keys % self.tile == 0,
      "min_keys",
      self.min_keys,
      f"must be a multiple of tile={self.tile}",
    )

  @staticmethod
  def of(target: TargetDescription, num_kv_heads: int) -> "SplitKV":
    """Splits that occupy `target`: an item is one block for every KV head.

    Args:
      target: the accelerator.
      num_kv_heads: Hkv.
    """
    return SplitKV(capacity=max(target.waves * target.num_sms // num_kv_heads, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanShape:
  """The static shape of one `StepPlan`: one per token bucket.

  Attributes:
    num_tokens: T, the bucket.
    num_rows: R.
    max_requests: Q.
    pages_per_request: M.
    cache: page pool.
    max_model_len: width of the token table.
    query_tile: most queries of one attention work item.
    splits: how decodes are split over work items; None: one item each.
    max_drafts: K, most draft tokens of a row.
  """

  num_tokens: int
  num_rows: int
  max_requests: int
  pages_per_request: int
  cache: CacheConfig
  max_model_len: int
  query_tile: int
  splits: SplitKV | None = None
  max_drafts: int = 0

  def __post_init__(self) -> None:
    for field in ("num_tokens", "num_rows", "query_tile"):
      _require(getattr(self, field) >= 1, field, getattr(self, field), "must be at least 1")

  @property
  def num_samples(self) -> int:
    """Most tokens that the head is asked about, R (1 + K): a row's last one and its drafts."""
    return self.num_rows * (1 + self.max_drafts)

  @property
  def num_decode_items(self) -> int:
    """Most work items of decodes, which come first in the list."""
    extra = self.splits.capacity if self.splits else 0
    return min(self.num_samples, self.num_tokens) + extra

  @property
  def num_work_items(self) -> int:
    """W: capacity of the work list. Each scheduled row has at most one partial tile."""
    return self.num_decode_items + self.num_tokens // self.query_tile

  @staticmethod
  def of(
    config: SchedulerConfig,
    num_tokens: int,
    query_tile: int = 512,
    splits: SplitKV | None = None,
  ) -> "PlanShape":
    """The plan shape of a bucket of `num_tokens` under `config`."""
    return PlanShape(
      num_tokens=num_tokens,
      num_rows=config.max_num_seqs,
      max_requests=config.max_requests,
      pages_per_request=config.pages_per_request,
      cache=config.cache,
      max_model_len=config.max_model_len,
      query_tile=min(query_tile, num_tokens),
      splits=splits,
      max_drafts=config.max_drafts,
    )
