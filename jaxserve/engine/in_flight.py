"""A dispatched step whose outputs have not been read, and what they say once they are."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

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
    evicted: pages whose cached content it took.
    dispatched_s: when it was handed to the device.
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
  evicted: int
  dispatched_s: float

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
    for row, (request, part) in enumerate(zip(self.requests, self.scheduled, strict=True)):
      if not part.samples or output is None or alive.get(request.slot) is not request:
        continue
      event = _token_event(request, output, row)
      request.outputs.append(event.token)
      request.logprobs.append(event.logprob)
      if event.token in request.stop_ids:
        stopped.append(request.slot)
      events.append((request.slot, event))
    return events, stopped


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
  return TokenEvent(
    request_id=request.id,
    cached_tokens=request.cached_tokens,
    token=int(output.tokens[row]),
    logprob=float(output.logprobs[row]),
    top_ids=tuple(output.top_ids[row].tolist()),
    top_logits=tuple(output.top_logits[row].tolist()),
    log_sum=float(output.log_sum[row]),
  )
