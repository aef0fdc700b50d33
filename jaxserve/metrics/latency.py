"""Latency of streams as formulas of timestamps, under the names of vLLM's serving benchmark.

With a the arrival of a request and t_1 < ... < t_n the times of its output tokens:
  TTFT = t_1 - a              time to the first token
  ITL  = t_i - t_(i-1)        inter-token latency: n - 1 gaps, pooled over all requests
  TPOT = (t_n - t_1)/(n - 1)  time per output token, one number a request; undefined for n = 1
  E2E  = t_n - a              end-to-end latency
Quantities of one request are in seconds, the summary is in milliseconds, as the names say.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

COMPLETED = frozenset({"stop", "length"})
PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestTimes:
  """One request as its user saw it; all times are in seconds on one clock.

  Attributes:
    request_id: its name.
    arrival_s: when it was submitted.
    token_times_s: when each output token came out, never falling.
    num_prompt: prompt tokens.
    finish_reason: "stop" or "length" if it completed, anything else (or None) if it did not.
  """

  request_id: str
  arrival_s: float
  token_times_s: Sequence[float] | np.ndarray
  num_prompt: int
  finish_reason: str | None

  @property
  def num_output(self) -> int:
    """Output tokens."""
    return len(self.token_times_s)

  @property
  def completed(self) -> bool:
    """Whether it ended by itself with some output; only such requests enter the statistics."""
    return self.finish_reason in COMPLETED and self.num_output > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slo:
  """Service-level objectives in seconds; None = no objective.

  Attributes:
    ttft_s: for the first token.
    tpot_s: for the time per output token.
    itl_s: for the longest gap between two tokens.
    e2e_s: for the whole request.
  """

  ttft_s: float | None = None
  tpot_s: float | None = None
  itl_s: float | None = None
  e2e_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stall:
  """A gap between two successive tokens of one stream.

  Attributes:
    request_id: of the stream.
    start_s: the token before.
    end_s: the token after.
  """

  request_id: str
  start_s: float
  end_s: float

  @property
  def seconds(self) -> float:
    """Length of the gap."""
    return self.end_s - self.start_s


def ttft_s(request: RequestTimes) -> float:
  """Time to the first token; the request must have one."""
  return request.token_times_s[0] - request.arrival_s


def itl_s(request: RequestTimes) -> np.ndarray:
  """The gaps between successive tokens; none for a request of one token."""
  return np.diff(np.asarray(request.token_times_s, np.float64))


def tpot_s(request: RequestTimes) -> float | None:
  """Mean gap between its tokens; None for a request of fewer than two."""
  gaps = itl_s(request)
  return float(gaps.mean()) if gaps.size else None


def e2e_s(request: RequestTimes) -> float:
  """Time to the last token; the request must have one."""
  return request.token_times_s[-1] - request.arrival_s


def span_s(requests: Sequence[RequestTimes]) -> float:
  """Seconds from the first arrival to the last token; 0 if no token came out."""
  ends = [request.token_times_s[-1] for request in requests if request.num_output]
  return float(max(ends)) - min(request.arrival_s for request in requests) if ends else 0.0


def longest_stall(requests: Sequence[RequestTimes]) -> Stall | None:
  """The largest gap in any stream, completed or not; None if no stream has two tokens."""
  longest = None
  for request in requests:
    gaps = itl_s(request)
    if gaps.size and (longest is None or gaps.max() > longest.seconds):
      at = int(gaps.argmax())
      before, after = request.token_times_s[at], request.token_times_s[at + 1]
      longest = Stall(request_id=request.request_id, start_s=float(before), end_s=float(after))
  return longest


def meets(request: RequestTimes, slo: Slo) -> bool:
  """Whether a completed request keeps every objective. Without a second token it has no gap."""
  measured = (
    (ttft_s(request), slo.ttft_s),
    (tpot_s(request) or 0.0, slo.tpot_s),
    (itl_s(request).max(initial=0.0), slo.itl_s),
    (e2e_s(request), slo.e2e_s),
  )
  return all(limit is None or value <= limit for value, limit in measured)


def goodput(requests: Sequence[RequestTimes], slo: Slo, duration_s: float | None = None) -> float:
  """Completed requests per second that keep every objective.

  Args:
    requests: all requests of the run.
    slo: the objectives.
    duration_s: length of the run; by default `span_s`.

  Returns:
    requests a second; 0 for a run of no length.
  """
  good = sum(request.completed and meets(request, slo) for request in requests)
  return _rate(good, span_s(requests) if duration_s is None else duration_s)


def _rate(count: int, duration_s: float) -> float:
  return count / duration_s if duration_s > 0 else 0.0


def _statistics(name: str, seconds: Sequence[float] | np.ndarray) -> dict[str, float | None]:
  """mean_NAME_ms, median, std, p50, p90, p99 and max; all None if there is nothing to measure."""
  keys = ("mean", "median", "std", *(f"p{q}" for q in PERCENTILES), "max")
  names = [f"{key}_{name}_ms" for key in keys]
  if not len(seconds):
    return dict.fromkeys(names)
  ms = 1e3 * np.asarray(seconds, np.float64)
  values = (ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, PERCENTILES), ms.max())
  return dict(zip(names, map(float, values), strict=True))


def summarize(
  requests: Sequence[RequestTimes],
  *,
  duration_s: float | None = None,
  slo: Slo | None = None,
) -> Mapping[str, float | int | None]:
  """The summary of a run, with vLLM's key names.

  Args:
    requests: all requests of the run. Only completed ones enter the latencies and the counts; the
      longest stall is over all.
    duration_s: length of the run; by default `span_s`.
    slo: objectives; adds request_goodput.

  Returns:
    completed, duration, total_input_tokens, total_output_tokens, request_throughput,
    output_throughput, total_token_throughput, longest_stall_ms, and for ttft, tpot, itl and e2el
    mean, median, std, p50, p90, p99 and max, such as p99_itl_ms. None where nothing was measured.
  """
  done = [request for request in requests if request.completed]
  duration = span_s(requests) if duration_s is None else duration_s
  inputs, outputs = sum(r.num_prompt for r in done), sum(r.num_output for r in done)
  stall = longest_stall(requests)
  summary: dict[str, float | int | None] = {
    "completed": len(done),
    "duration": duration,
    "total_input_tokens": inputs,
    "total_output_tokens": outputs,
    "request_throughput": _rate(len(done), duration),
    "output_throughput": _rate(outputs, duration),
    "total_token_throughput": _rate(inputs + outputs, duration),
    "longest_stall_ms": 1e3 * stall.seconds if stall else None,
  }
  if slo is not None:
    summary["request_goodput"] = goodput(requests, slo, duration)
  per_request = [t for r in done if (t := tpot_s(r)) is not None]
  gaps = np.concatenate([itl_s(r) for r in done]) if done else np.empty(0)
  return (
    summary
    | _statistics("ttft", [ttft_s(r) for r in done])
    | _statistics("tpot", per_request)
    | _statistics("itl", gaps)
    | _statistics("e2el", [e2e_s(r) for r in done])
  )
