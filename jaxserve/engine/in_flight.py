"""A dispatched step whose outputs have not been read, and what they say once they are."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

from jaxserve.engine import prompt_scores
from jaxserve.engine.request import Request, Scheduled, TokenEvent
from jaxserve.types import Decision, StepOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFlight:
  """A dispatched step.

  Attributes:
    step: its number since the engine was built.
    bucket: T, tokens it was padded to.
    budget: token budget it was scheduled under.
    decision: packed.
    requests: by row.
    scheduled: what it computes for each of them.
    admitted: request ids.
    preempted: request ids.
    output: None where no row samples.
    done: ready when the forward pass is.
    dispatched_s: when it was handed to the device.
    plan_s: how long the host took to schedule it and to lay it out.
    scores: of prompt tokens that it computes.
  """

  step: int
  bucket: int
  budget: int
  decision: jax.Array
  requests: tuple[Request, ...]
  scheduled: tuple[Scheduled, ...]
  admitted: tuple[int, ...]
  preempted: tuple[int, ...]
  output: StepOutput | None
  done: jax.Array
  dispatched_s: float
  plan_s: float
  scores: tuple[prompt_scores.Part, ...] = ()

  def take_outputs(
    self, alive: Mapping[int, Request], output: StepOutput | None
  ) -> tuple[list[tuple[int, TokenEvent]], list[int]]:
    """Appends the new tokens to their requests.

    Args:
      alive: requests by slot; the tokens of others are dropped.
      output: of this step, on the host.

    Returns:
      (new tokens by slot, slots that they stop).
    """
    events: list[tuple[int, TokenEvent]] = []
    stopped: list[int] = []
    prompt_scores.gather(self.scores)
    for row, (request, part) in enumerate(zip(self.requests, self.scheduled, strict=True)):
      if not part.samples or output is None or alive.get(request.slot) is not request:
        continue
      event = _token_event(request, output, row)
      request.outputs.append(event.token)
      request.logprobs.append(event.logprob)
      ends = request.constraint is not None and request.constraint.accept(event.token)
      if ends or event.finish_reason or event.token in request.stop_ids:
        stopped.append(request.slot)
      events.append((request.slot, event))
    return events, stopped


def scheduled_parts(decision: Decision, requests: Sequence[Request]) -> tuple[Scheduled, ...]:
  """What a decision, on the host, grants to each of the requests that it schedules."""
  tokens, start, samples = decision.tokens, decision.start, decision.samples
  return tuple(
    Scheduled(
      request_id=request.id,
      start=int(start[request.slot]),
      tokens=int(tokens[request.slot]),
      new_pages=int(decision.new_pages[request.slot]),
      samples=bool(samples[request.slot]),
      is_prefill=int(start[request.slot]) < len(request.prompt),
    )
    for request in requests
  )


def _token_event(request: Request, output: StepOutput, row: int) -> TokenEvent:
  count, logprob = request.sampling.num_top, float(output.logprobs[row])
  return TokenEvent(
    request_id=request.id,
    token=int(output.tokens[row]),
    logprob=logprob,
    top_ids=tuple(output.top_ids[row][:count].tolist()),
    top_logits=tuple(output.top_logits[row][:count].tolist()),
    log_sum=float(output.log_sum[row]),
    finish_reason="error" if math.isnan(logprob) else None,
    prompt_scores=None if request.outputs else prompt_scores.joined(request),
  )
