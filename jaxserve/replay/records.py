"""What happened in a run, as plain data: what the report draws. `recording` keeps it in a file.

Times are in seconds on one clock for a whole run; its origin does not matter.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxserve import metrics

Kind = Literal["prefill", "decode"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRequest:
  """What one request got in one step.

  Attributes:
    id: of the request.
    tokens: computed for it.
    kind: "prefill" for a chunk of its prompt (or of a replay after preemption), else "decode".
    start: position of the first of these tokens in the request.
    new_pages: pages handed to it in this step.
    samples: the step yields its next output token.
    cached: tokens that it found in the prefix cache when it was admitted in this step.
    drafts: how many of the tokens, the last ones, are drafts to be verified.
    accepted: how many of the drafts, the first ones, the model found right.
  """

  id: str
  tokens: int
  kind: Kind
  start: int = 0
  new_pages: int = 0
  samples: bool = False
  cached: int = 0
  drafts: int = 0
  accepted: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepToken:
  """One token that a step sampled.

  Attributes:
    id: of the request.
    token: its id in the vocabulary.
  """

  id: str
  token: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
  """One step of the engine.

  Attributes:
    step: its number in the run.
    start_s: when it was dispatched; with overlap, perhaps before the previous step ended.
    end_s: when its tokens were on the host.
    budget: most tokens it was allowed.
    bucket: tokens that the executable computes, padding included.
    num_tokens: tokens scheduled.
    requests: who got them, in order of service.
    preempted: requests that lost their pages in this step.
    admitted: requests that entered the running set in this step.
    rows: rows that the head computes, padding included; 0 if no request samples.
    outputs: sampled tokens, in order of service; none of requests that were gone by then.
    logits: digest of what the model said of these outputs; None without any.
    evicted: pages whose cached content was lost to a request of this step.
  """

  step: int
  start_s: float
  end_s: float
  budget: int
  bucket: int
  num_tokens: int
  requests: Sequence[StepRequest]
  preempted: Sequence[str] = ()
  admitted: Sequence[str] = ()
  rows: int = 0
  outputs: Sequence[StepToken] = ()
  logits: str | None = None
  evicted: int = 0

  def tokens_of(self, kind: Kind) -> int:
    """Tokens of one kind."""
    return sum(request.tokens for request in self.requests if request.kind == kind)

  @property
  def padding(self) -> int:
    """Tokens that the bucket computes for nobody."""
    return self.bucket - self.num_tokens

  def to_dict(self) -> dict[str, Any]:
    """Plain data for JSON."""
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestTrace:
  """One request of a run.

  Attributes:
    id: unique in the run; the same request has the same id in every run.
    arrival_s: when it was submitted.
    token_times_s: when each output token reached the host.
    num_prompt: prompt tokens.
    finish_reason: "stop", "length", "abort" or None.
    is_long_prompt: the request whose effect on the others is studied.
    is_warmup: left out of the statistics.
  """

  id: str
  arrival_s: float
  token_times_s: Sequence[float]
  num_prompt: int
  finish_reason: str | None
  is_long_prompt: bool = False
  is_warmup: bool = False

  @property
  def times(self) -> metrics.RequestTimes:
    """The same as the metrics want it."""
    return metrics.RequestTimes(
      request_id=self.id,
      arrival_s=self.arrival_s,
      token_times_s=self.token_times_s,
      num_prompt=self.num_prompt,
      finish_reason=self.finish_reason,
    )

  def to_dict(self) -> dict[str, Any]:
    """Plain data for JSON."""
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
  """One run of a workload.

  Attributes:
    name: shown to people.
    policy: name of the scheduling policy.
    budget: most tokens of a step.
    chunked_prefill: whether prompts may be split over steps.
    steps: in order.
    requests: in order of arrival.
  """

  name: str
  policy: str
  budget: int
  chunked_prefill: bool
  steps: Sequence[StepRecord]
  requests: Sequence[RequestTrace]

  @property
  def start_s(self) -> float:
    """When the first thing happened; 0 for an empty run."""
    starts = [step.start_s for step in self.steps] + [r.arrival_s for r in self.requests]
    return min(starts, default=0.0)

  @property
  def end_s(self) -> float:
    """When the last thing happened; 0 for an empty run."""
    ends = [step.end_s for step in self.steps]
    ends += [time for r in self.requests for time in (r.arrival_s, *r.token_times_s)]
    return max(ends, default=0.0)

  @property
  def acceptance(self) -> metrics.Acceptance:
    """Drafts of all steps."""
    return metrics.Acceptance.of(
      (part.drafts, part.accepted)
      for step in self.steps
      for part in step.requests
      if part.samples and part.kind == "decode"
    )

  @property
  def long_prompt(self) -> RequestTrace | None:
    """The request whose effect is studied, if there is one."""
    return next((request for request in self.requests if request.is_long_prompt), None)

  def to_dict(self) -> dict[str, Any]:
    """Plain data for JSON."""
    return dataclasses.asdict(self)


def run_result(run: RunRecord) -> dict[str, Any]:
  """The numbers of a run, as `result.json` lists them. Warm-up requests are left out.

  Returns:
    name, policy, budget, chunked_prefill, steps; p50, p99 and max of TTFT and ITL such as
    p99_itl_ms; long_prompt_ttft_ms, longest_stall_ms, output_throughput (tokens/s),
    padding_fraction (of the tokens computed), preemptions, and what the prefix cache did, see
    `prefix_result`. None where nothing was measured. Where something was drafted, also what
    `metrics.Acceptance.summary` lists.
  """
  summary = metrics.summarize([r.times for r in run.requests if not r.is_warmup])
  computed = sum(step.bucket for step in run.steps)
  long_prompts = [r.times for r in run.requests if r.is_long_prompt and r.token_times_s]
  shown = [f"{q}_{name}_ms" for name in ("itl", "ttft") for q in ("p50", "p99", "max")]
  result = {
    "name": run.name,
    "policy": run.policy,
    "budget": run.budget,
    "chunked_prefill": run.chunked_prefill,
    "steps": len(run.steps),
    **{key: summary[key] for key in shown},
    "long_prompt_ttft_ms": 1e3 * metrics.ttft_s(long_prompts[0]) if long_prompts else None,
    "longest_stall_ms": summary["longest_stall_ms"],
    "output_throughput": summary["output_throughput"],
    "padding_fraction": sum(s.padding for s in run.steps) / computed if computed else 0.0,
    "preemptions": sum(len(step.preempted) for step in run.steps),
    **prefix_result(run),
  }
  if run.acceptance.drafts:
    result |= run.acceptance.summary()
  return {key: round(x, 4) if isinstance(x, float) else x for key, x in result.items()}


def prefix_result(run: RunRecord) -> dict[str, Any]:
  """What the prefix cache did in a run, in tokens, but for evictions, which are pages.

  A request is counted when it is admitted for the first time; prefix_resumed_tokens are what
  preempted requests found again. The rate is None if no request was admitted.
  """
  prompts = {request.id: request.num_prompt for request in run.requests}
  seen: set[str] = set()
  queried = hit = resumed = 0
  for step in run.steps:
    for part in step.requests:
      if part.id in step.admitted:
        again = part.id in seen
        queried += 0 if again else prompts.get(part.id, 0)
        hit, resumed = hit + (0 if again else part.cached), resumed + (part.cached if again else 0)
    seen.update(step.admitted)
  return {
    "prefix_queried_tokens": queried,
    "prefix_hit_tokens": hit,
    "prefix_hit_rate": hit / queried if queried else None,
    "prefix_resumed_tokens": resumed,
    "prefix_evictions": sum(step.evicted for step in run.steps),
  }
