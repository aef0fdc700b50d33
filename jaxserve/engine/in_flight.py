"""A dispatched step whose outputs have not been read, and what they say once they are."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
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
    self.done.block_until_ready()
    if self.output is None:
      return None
    at = () if self.place is None else self.place
    fields: dict[str, Any] = {
      name: None if x is None else np.asarray(x)[at] for name, x in vars(self.output).items()
    }
    return StepOutput(**fields)

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
    prompt_scores.gather(self.scores)
    if output is None:
      return taken
    rows, counts, proposals = self._on_host(output)
    place, events = 0, taken.events
    for row, (request, part) in enumerate(zip(self.requests, self.scheduled, strict=True)):
      first, place, slot = place, place + 1 + part.drafts, request.slot
      if not part.samples or alive.get(slot) is not request:
        continue
      count = 1 if counts is None else sum(counts[first:place])
      taken.outputs[slot] = count
      if proposals is not None and request.speculates:
        proposed = proposals[row]
        if request.restraint:
          proposed = request.restraint.allow(proposed, part.drafts, count - 1)
        taken.proposed[slot] = proposed
      for at in range(first, first + count):
        event = _token_event(request, *rows[at])
        request.outputs.append(event.token)
        request.logprobs.append(event.logprob)
        events.append((slot, event))
        ends = request.constraint is not None and request.constraint.accept(event.token)
        if ends or event.finish_reason or event.token in request.stop_ids:
          taken.stopped.append(slot)
          break
    return taken

  def verified(self, taken: Taken) -> tuple[Scheduled, ...]:
    """`scheduled`, with the drafts that were accepted."""
    if self.output is None or self.output.counts is None:
      return self.scheduled  # nobody drafts
    return tuple(
      part._replace(accepted=taken.outputs.get(request.slot, 1) - 1) if part.drafts else part
      for request, part in zip(self.requests, self.scheduled, strict=True)
    )

  def _on_host(
    self, output: StepOutput
  ) -> tuple[list[tuple[Any, ...]], list[int] | None, list[int] | None]:
    """(the arguments of `_token_event` for every place, counts, proposed), in Python's numbers.

    To take them out of arrays one by one would be slow.
    """
    places = len(self.scheduled)
    if output.counts is not None:
      places += sum(part.drafts for part in self.scheduled)
    most = max((request.sampling.num_top for request in self.requests), default=0)
    rows = zip(
      output.tokens[:places].tolist(),
      output.logprobs[:places].tolist(),
      map(tuple, output.top_ids[:places, :most].tolist()),
      map(tuple, output.top_logits[:places, :most].tolist()),
      output.log_sum[:places].tolist(),
      strict=True,
    )
    counts, proposed = output.counts, output.proposed
    return (
      list(rows),
      None if counts is None else counts[:places].tolist(),
      None if proposed is None else proposed[: len(self.requests)].tolist(),
    )


def scheduled_parts(decision: Decision, requests: Sequence[Request]) -> tuple[Scheduled, ...]:
  """What a decision, on the host, grants to each of the requests that it schedules.

  Notes in the requests that they were admitted, and what they found in the prefix cache.
  """
  slots = decision.order[: len(requests)]
  start = decision.start[slots].tolist()
  parts: Iterable[Scheduled] = map(
    Scheduled,
    [request.id for request in requests],
    start,
    decision.tokens[slots].tolist(),
    decision.new_pages[slots].tolist(),
    decision.samples[slots].tolist(),
    [first < len(request.prompt) for first, request in zip(start, requests, strict=True)],
  )
  if decision.admitted.any():
    admitted = decision.admitted[slots].tolist()
    parts = (
      part._replace(**_admission(decision, request)) if new else part
      for part, request, new in zip(parts, requests, admitted, strict=True)
    )
  if decision.drafts is not None:
    drafts = decision.drafts[slots].tolist()
    parts = (part._replace(drafts=n) for part, n in zip(parts, drafts, strict=True))
  return tuple(parts)


def _admission(decision: Decision, request: Request) -> dict[str, Any]:
  cached = 0 if decision.cached is None else int(decision.cached[request.slot])
  request.num_admissions += 1
  if request.num_admissions == 1:
    request.cached_tokens = cached
  return {
    "admission": "first" if request.num_admissions == 1 else "again",
    "cached": cached,
    "known": len(request.prompt) + len(request.outputs),
  }


def _token_event(
  request: Request, token: int, logprob: float, top_ids: tuple[int, ...],
  top_logits: tuple[float, ...], log_sum: float,
) -> TokenEvent:  # fmt: skip
  count = request.sampling.num_top
  return TokenEvent(
    request.id,
    token,
    logprob,
    top_ids[:count],
    top_logits[:count],
    log_sum,
    "error" if math.isnan(logprob) else None,
    None if request.outputs else prompt_scores.joined(request),
    request.cached_tokens,
  )
