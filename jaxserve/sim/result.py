"""What a simulation tells: times of every request and every token, and sums over steps."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxserve import metrics


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SimResult:
  """Times are f64 seconds since the workload began, exact to the nanosecond.

  `...` stands for the lanes of a sweep; none after `simulate` or `lane`. n requests in order of
  arrival, t outputs: those of request 0, then of request 1, and so on, padded at the end where
  the workloads of lanes differ.

  Attributes:
    arrival_s: f64[..., n].
    num_prompt: i32[..., n].
    num_output: i32[..., n], outputs of each; t is their sum.
    started_s: f64[..., n], begin of the first step that computed any of its tokens.
    token_s: f64[..., t], when each output came out.
    steps: i64[...], steps that computed something.
    tokens: i64[...], tokens computed, those computed again after a preemption included.
    padding: i64[...], tokens added to fill buckets.
    preemptions: i64[...].
    busy_s: f64[...], sum of the steps' durations.
    cached: i64[...], tokens found in the prefix cache, those of resumed requests included.
  """

  arrival_s: np.ndarray
  num_prompt: np.ndarray
  num_output: np.ndarray
  started_s: np.ndarray
  token_s: np.ndarray
  steps: np.ndarray
  tokens: np.ndarray
  padding: np.ndarray
  preemptions: np.ndarray
  busy_s: np.ndarray
  cached: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((), np.int64))

  @property
  def lanes(self) -> tuple[int, ...]:
    """Shape of the lanes; () if there are none."""
    return self.steps.shape

  def lane(self, *index: int) -> "SimResult":
    """One lane, or all below a leading index."""
    fields = {f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)}
    return SimResult(**fields)

  @property
  def last_output(self) -> np.ndarray:
    """i64[..., n]: index of each request's last output in `token_s`."""
    return np.cumsum(self.num_output, axis=-1, dtype=np.int64) - 1

  @property
  def first_output(self) -> np.ndarray:
    """i64[..., n]: index of each request's first output in `token_s`."""
    return self.last_output - self.num_output + 1

  @property
  def ttft_s(self) -> np.ndarray:
    """f64[..., n]: time to the first token."""
    return np.take_along_axis(self.token_s, self.first_output, -1) - self.arrival_s

  @property
  def e2e_s(self) -> np.ndarray:
    """f64[..., n]: time to the last token."""
    return np.take_along_axis(self.token_s, self.last_output, -1) - self.arrival_s

  @property
  def tpot_s(self) -> np.ndarray:
    """f64[..., n]: mean gap between tokens; nan for a request of one."""
    gaps = self.num_output - 1
    return np.where(gaps > 0, (self.e2e_s - self.ttft_s) / np.maximum(gaps, 1), np.nan)

  @property
  def scheduling_delay_s(self) -> np.ndarray:
    """f64[..., n]: from the arrival to the begin of the first step that serves it."""
    return self.started_s - self.arrival_s

  def itl_s(self) -> np.ndarray:
    """f64[t - n]: all gaps between successive tokens of a request, of a result without lanes."""
    self._single()
    inner = np.ones(int(self.num_output.sum()), bool)
    inner[self.first_output] = False
    return np.diff(self.token_s[: len(inner)], prepend=0.0)[inner]

  def requests(self) -> list[metrics.RequestTimes]:
    """The requests for `jaxserve.metrics`, of a result without lanes; named by their number."""
    self._single()
    return [
      metrics.RequestTimes(
        request_id=str(number),
        arrival_s=float(self.arrival_s[number]),
        token_times_s=self.token_s[first : last + 1],
        num_prompt=int(self.num_prompt[number]),
        finish_reason="length",
      )
      for number, (first, last) in enumerate(
        zip(self.first_output, self.last_output, strict=True)
      )
    ]  # fmt: skip

  def summary(self, slo: metrics.Slo | None = None) -> Mapping[str, float | int | None]:
    """`metrics.summarize` of a result without lanes, and what only a simulation knows.

    Adds p50, p99 and max_scheduling_delay_ms, steps, preemptions, utilization (share of the time in
    which a step runs), padding_share (of all tokens in steps), tokens_per_step and
    cached_tokens.
    """
    requests = self.requests()
    duration = metrics.span_s(requests)
    delay = 1e3 * self.scheduling_delay_s
    steps, tokens, padding = int(self.steps), int(self.tokens), int(self.padding)
    return dict(metrics.summarize(requests, duration_s=duration, slo=slo)) | {
      "p50_scheduling_delay_ms": float(np.percentile(delay, 50)),
      "p99_scheduling_delay_ms": float(np.percentile(delay, 99)),
      "max_scheduling_delay_ms": float(delay.max()),
      "steps": steps,
      "preemptions": int(self.preemptions),
      "utilization": float(self.busy_s) / duration if duration > 0 else 0.0,
      "padding_share": padding / max(tokens + padding, 1),
      "tokens_per_step": tokens / max(steps, 1),
      "cached_tokens": int(self.cached),
    }

  def _single(self) -> None:
    if self.lanes:
      raise ValueError(f"lanes={self.lanes}: choose one with result.lane(...)")
