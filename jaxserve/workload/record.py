"""A workload as arrays: one entry a request, in order of arrival."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
  """An open-loop workload: every request is sent at its time, whatever the server does.

  Attributes:
    arrival_s: f64[n], seconds since the workload began; finite, from 0 on, never falling.
    num_prompt: i32[n], prompt tokens, at least 1.
    num_output: i32[n], output tokens, at least 1.
    priority: i32[n], smaller is more urgent; 0 for all unless given.

  Raises:
    ValueError: naming the field, the request and the value.
  """

  arrival_s: np.ndarray
  num_prompt: np.ndarray
  num_output: np.ndarray
  priority: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))

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
    times = self.arrival_s
    _check(np.isfinite(times) & (times >= 0), "arrival_s", times, "must be finite and from 0 on")
    _check(np.diff(times, prepend=0.0) >= 0, "arrival_s", times, "must never fall: sort first")

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
    return Workload(**{name: getattr(self, name)[keep] for name in fields})


def _check(ok: np.ndarray, name: str, value: np.ndarray, remedy: str) -> None:
  if not ok.all():
    index = int(np.argmin(ok))
    raise ValueError(f"{name}[{index}]={value[index]}: {remedy}")
