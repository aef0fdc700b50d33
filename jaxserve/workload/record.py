"""A workload as arrays: one entry a request, in order of arrival."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
  """An open-loop workload: every request is sent at its time, whatever the server does.

  Attributes:
    arrival_s: f64[n], seconds since the workload began; finite, from 0 on, never falling.
    num_prompt: i32[n], prompt tokens, at least 1.
    num_output: i32[n], output tokens, at least 1.
    priority: i32[n], smaller is more urgent; 0 for all unless given.
    blocks: for each request, ids of the first blocks of its prompt; equal ids stand for equal text,
      up to the block's end. What they do not cover, no other request has. Empty where nothing is
      known of the text.
    block_size: tokens of a block; the last one of a prompt may be shorter.

  Raises:
    ValueError: naming the field, the request and the value.
  """

  arrival_s: np.ndarray
  num_prompt: np.ndarray
  num_output: np.ndarray
  priority: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  blocks: Sequence[Sequence[int]] = ()
  block_size: int = 512

  def __post_init__(self) -> None:
    count = len(self.arrival_s)
    if not len(self.priority):
      object.__setattr__(self, "priority", np.zeros(count, np.int32))
    object.__setattr__(self, "arrival_s", np.asarray(self.arrival_s, np.float64))
    for name in ("num_prompt", "num_output", "priority"):
      value = np.asarray(getattr(self, name), np.int32)
      object.__setattr__(self, name, value)
      if value.shape != (count,):
        raise ValueError(f"{name}: has shape {value.shape}, arrival_s has {count} requests")
      if name != "priority":
        _check(value >= 1, name, value, "must be at least 1")
    self._check_blocks()
    times = self.arrival_s
    _check(np.isfinite(times) & (times >= 0), "arrival_s", times, "must be finite and from 0 on")
    _check(np.diff(times, prepend=0.0) >= 0, "arrival_s", times, "must never fall: sort first")

  def _check_blocks(self) -> None:
    if not self.blocks:
      return
    counts = np.asarray([len(ids) for ids in self.blocks])
    if counts.shape != self.num_prompt.shape:
      raise ValueError(f"blocks: has {len(counts)} requests, arrival_s has {len(self)}")
    most = -(-self.num_prompt // self.block_size)
    _check(counts <= most, "len(blocks)", counts, f"a block has {self.block_size} tokens")

  def __len__(self) -> int:
    return len(self.arrival_s)

  @property
  def span_s(self) -> float:
    """Seconds from the begin to the last arrival; 0 if there is none."""
    return float(self.arrival_s[-1]) if len(self) else 0.0

  @property
  def rate(self) -> float:
    """Requests a second over `span_s`; 0 if it has no length."""
    return len(self) / self.span_s if self.span_s > 0 else 0.0

  def first(self, count: int) -> "Workload":
    """The first `count` requests."""
    return self.where(np.arange(len(self)) < count)

  def until(self, seconds: float) -> "Workload":
    """The requests that arrive within the first `seconds`."""
    return self.where(self.arrival_s < seconds)

  def fitting(self, max_total: int) -> "Workload":
    """The requests of at most `max_total` tokens, prompt and output together."""
    return self.where(self.num_prompt.astype(np.int64) + self.num_output <= max_total)

  def faster(self, factor: float) -> "Workload":
    """The same requests at `factor` times the rate: arrival times divided by it.

    Raises:
      ValueError: factor is not a positive number.
    """
    if not 0 < factor < float("inf"):
      raise ValueError(f"factor={factor}: must be a positive number")
    return dataclasses.replace(self, arrival_s=self.arrival_s / factor)

  def where(self, keep: np.ndarray) -> "Workload":
    """The requests chosen by a mask bool[n] or indices i32[k], in that order."""
    fields = ("arrival_s", "num_prompt", "num_output", "priority")
    chosen = np.arange(len(self))[keep]
    return Workload(
      **{name: getattr(self, name)[keep] for name in fields},
      blocks=[self.blocks[i] for i in chosen] if self.blocks else (),
      block_size=self.block_size,
    )

  def prompt(self, index: int, vocab_size: int) -> np.ndarray:
    """Token ids i32[num_prompt] of a request, made up: equal blocks have equal ones.

    The same on every machine.
    """
    length, blocks = int(self.num_prompt[index]), self.blocks[index] if self.blocks else ()
    count = -(-length // self.block_size)
    own = [_OWN_BLOCKS + index * _OWN_BLOCKS // len(self) + i for i in range(count)]
    ids = np.asarray([*blocks, *own[len(blocks) :]], np.uint64)
    place = np.arange(self.block_size, dtype=np.uint64)
    words = _mix(_mix(ids)[:, None] + place[None])
    return (words % np.uint64(vocab_size)).astype(np.int32).ravel()[:length]


_OWN_BLOCKS = 1 << 60  # ids from here on are of no trace


def _mix(x: np.ndarray) -> np.ndarray:
  """Bits that look random, u64 of any shape. Source: the finalizer of SplitMix64."""
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
  return x ^ (x >> np.uint64(31))


def _check(ok: np.ndarray, name: str, value: np.ndarray, remedy: str) -> None:
  if not ok.all():
    index = int(np.argmin(ok))
    raise ValueError(f"{name}[{index}]={value[index]}: {remedy}")
