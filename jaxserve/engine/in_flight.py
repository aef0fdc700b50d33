"""A dispatched step whose outputs have not been read, and what they say once they are."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.config import SchedulerConfig
from jaxserve.engine import prompt_scores
from jaxserve.engine.request import Request, Scheduled, TokenEvent
from jaxserve.engine.speculation import by_slot
from jaxserve.types import Decision, StepOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
  """What a step yielded, by slot.

  Attributes:
    events: new tokens in order.
    stopped: slots that they stop.
    outputs: how many tokens the model found right, those past a stop included.
    proposed: drafts that lie behind them, where there is a drafter.
  """

  events: list[tuple[int, TokenEvent]] = dataclasses.field(default_factory=list)
  stopped: list[int] = dataclasses.field(default_factory=list)
  outputs: dict[int, int] = dataclasses.field(default_factory=dict)
  proposed: dict[int, int] = dataclasses.field(default_factory=dict)

  def counts(self, config: SchedulerConfig) -> tuple[np.ndarray, ...]:
    """For `commit`: i32[2, Q] `outputs` and `proposed`; nothing without drafts."""
    if not config.max_drafts:
      return ()
    size = config.max_requests
    return (np.stack([by_slot(self.outputs, size, 1), by_slot(self.proposed, size, 0)]),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFlight:
  """A dispatched step.

  Attributes:
    bucket: T, tokens it was padded to.
    budget: token budget it was scheduled under.
    decision: packed.
    requests: by row.
    scheduled: what it computes for each of them.
    admitted: request ids.
    preempted: request ids.
    output: None where no row samples.
    done: ready when the forward pass is.
    place: which of several steps that were dispatched together; None: it was alone.
    evicted: pages whose cached content it took.
    dispatched_s: when it was handed to the device.
    plan_s: how long the host took to schedule it and to lay it out.
    scores: of prompt tokens that it computes.
  """

  bucket: int
  budget: int
  decision: jax.Array | np.ndarray
  requests: tuple[Request, ...]
  scheduled: tuple[Scheduled, ...]
  admitted: tuple[int, ...]
  preempted: tuple[int, ...]
  output: StepOutput | None
  done: jax.Array
  evicted: int
  dispatched_s: float
  plan_s: float
  scores: tuple[prompt_scores.Part, ...] = ()
  place: int | None = None

  def read(self) -> StepOutput | None:
    """Waits for the step; its output, on the host."""
    jax.block_until_ready(self.done)
    if self.place is None:
      return jax.tree.map(np.asarray, self.output)  # None stays None
    return jax.tree.map(lambda x: np.asarray(x)[self.place], self.output)

  @property
  def was_run(self) -> bool:
    """False, of a step that was read, if all its requests had stopped before it."""
    return self.place is None or self.place < int(self.done)

  def take_outputs(self, alive: Mapping[int, Request], output: StepOutput | None) -> Taken:
    """Appends the new tokens to their requests, up to one that stops them.

    Args:
      alive: requests by slot; the tokens of others are dropped.
      output: of this step, on the host.
    """
    taken = Taken()
    place = 0
    prompt_scores.gather(self.scores)
    for row, (request, part) in enumerate(zip(self.requests, self.scheduled, strict=True)):
      first, place = place, place + 1 + part.drafts
      if not part.samples or output is None or alive.get(request.slot) is not request:
        continue
      count = 1 if output.counts is None else int(output.counts[first:place].sum())
      taken.outputs[request.slot] = count
      if output.proposed is not None and request.speculates:
        proposed = int(output.proposed[row])
        if request.restraint:
          proposed = request.restraint.allow(proposed, part.drafts, count - 1)
        taken.proposed[request.slot] = proposed
      for at in range(first, first + count):
        event = _token_event(request, output, at)
        request.outputs.append(event.token)
        request.logprobs.append(event.logprob)
        taken.events.append((request.slot, event))
        ends = request.constraint is not None and request.constraint.accept(event.token)
        if ends or event.finish_reason or event.token in request.stop_ids:
          taken.stopped.append(request.slot)
          break
    return taken

  def verified(self, taken: Taken) -> tuple[Scheduled, ...]:
    """`scheduled`, with the drafts that were accepted."""
    if not any(part.drafts for part in self.scheduled):
      return self.scheduled
    return tuple(
      dataclasses.replace(part, accepted=taken.outputs.get(request.slot, 1) - 1)
      if part.drafts else part
      for request, part in zip(self.requests, self.scheduled, strict=True)
    )  # fmt: skip


def scheduled_parts(decision: Decision, requests: Sequence[Request]) -> tuple[Scheduled, ...]:
  """What a decision, on the host, grants to each of the requests that it schedules.

  Notes in the requests that they were admitted, and what they found in the prefix cache.
  """
  tokens, start, samples = decision.tokens, decision.start, decision.samples
  for request in requests:
    if decision.admitted[request.slot]:
      request.num_admissions += 1
      if request.num_admissions == 1 and decision.cached is not None:
        request.cached_tokens = int(decision.cached[request.slot])
  return tuple(
    Scheduled(
      request_id=request.id,
      start=int(start[request.slot]),
      tokens=int(tokens[request.slot]),
      new_pages=int(decision.new_pages[request.slot]),
      samples=bool(samples[request.slot]),
      is_prefill=int(start[request.slot]) < len(request.prompt),
      **_admission(decision, request),
      drafts=0 if decision.drafts is None else int(decision.drafts[request.slot]),
    )
    for request in requests
  )


def _admission(decision: Decision, request: Request) -> dict[str, Any]:
  if not decision.admitted[request.slot]:
    return {}
  return {
    "admission": "first" if request.num_admissions == 1 else "again",
    "cached": 0 if decision.cached is None else int(decision.cached[request.slot]),
    "known": len(request.prompt) + len(request.outputs),
  }


def _token_event(request: Request, output: StepOutput, row: int) -> TokenEvent:
  count, logprob = request.sampling.num_top, float(output.logprobs[row])
  return TokenEvent(
    request_id=request.id,
    cached_tokens=request.cached_tokens,
    token=int(output.tokens[row]),
    logprob=logprob,
    top_ids=tuple(output.top_ids[row][:count].tolist()),
    top_logits=tuple(output.top_logits[row][:count].tolist()),
    log_sum=float(output.log_sum[row]),
    finish_reason="error" if math.isnan(logprob) else None,
    prompt_scores=None if request.outputs else prompt_scores.joined(request),
  )
