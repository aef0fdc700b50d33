"""Sends a workload to an engine in wall-clock time and writes down what happened."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from jaxserve.engine import Engine, SamplingParams, clock
from jaxserve.engine.request import TokenEvent
from jaxserve.replay.recorder import Recorder
from jaxserve.replay.records import RequestTrace, RunRecord, StepRecord
from jaxserve.replay.workload import Arrival

Outputs = Mapping[str, Sequence[TokenEvent]]


def run(
  recorder: Recorder, arrivals: Sequence[Arrival], name: str, policy: str
) -> tuple[RunRecord, Outputs]:
  """Runs an open-loop workload to its end under the engine's current parameters.

  Args:
    recorder: of an idle engine; the run is recorded.
    arrivals: in order of time.
    name: of the run, for people.
    policy: of the scheduler, for the record.

  Returns:
    (what happened, the tokens of every request).
  """
  engine, begin, pending = recorder.engine, clock.now(), collections.deque(arrivals)
  names: dict[int, str] = {}
  steps: list[StepRecord] = []
  outputs: dict[str, list[TokenEvent]] = {arrival.id: [] for arrival in arrivals}
  times: dict[str, list[float]] = {arrival.id: [] for arrival in arrivals}
  with recorder.run(name, policy):
    while pending or not engine.is_idle:
      while pending and begin + pending[0].at_s <= clock.now():
        arrival = pending.popleft()
        sampling = SamplingParams(max_tokens=arrival.max_tokens)
        names[recorder.submit(arrival.id, arrival.prompt, sampling)] = arrival.id
      events = engine.step()
      if events is None:
        if pending:
          clock.sleep_until(begin + pending[0].at_s)
        continue
      assert recorder.last_step is not None, "it has just been told of a step"
      steps.append(recorder.last_step)
      for event in events.outputs:
        outputs[names[event.request_id]].append(event)
        times[names[event.request_id]].append(events.done_s)
  return RunRecord(
    name=name,
    policy=policy,
    budget=int(engine.params.budget),
    chunked_prefill=bool(engine.params.chunked_prefill),
    steps=steps,
    requests=[_trace(a, begin, times[a.id], outputs[a.id]) for a in arrivals],
  ), outputs


def decode_step_seconds(engine: Engine, prompt: Sequence[int], rows: int, steps: int) -> float:
  """Warms the engine up with `rows` greedy requests; the median seconds of a step of decodes."""
  for _ in range(rows):
    engine.submit(prompt, SamplingParams(max_tokens=steps, ignore_eos=True))
  ends = []
  while events := engine.step():
    if not any(part.is_prefill for part in events.scheduled):
      ends.append(events.done_s)
  gaps = sorted(after - before for before, after in zip(ends, ends[1:], strict=False))
  return gaps[len(gaps) // 2]


def _trace(
  arrival: Arrival, begin: float, times: Sequence[float], outputs: Sequence[TokenEvent]
) -> RequestTrace:
  return RequestTrace(
    id=arrival.id,
    arrival_s=begin + arrival.at_s,
    token_times_s=times,
    num_prompt=len(arrival.prompt),
    finish_reason=outputs[-1].finish_reason if outputs else None,
    is_long_prompt=arrival.is_long_prompt,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
  """Whether two runs said the same.

  Attributes:
    equal: every stream is the same, or differs first where its two candidates were nearly tied.
    near_ties: streams of the second kind.
  """

  equal: bool
  near_ties: int


def compare(first: Outputs, second: Outputs, tie: float = 0.1) -> Agreement:
  """Compares greedy streams of two runs of the same workload.

  Different chunk boundaries round differently in 16 bits, so a stream may part where two tokens
  have almost the same logit; from there on it is another text.

  Args:
    first: tokens by request.
    second: the same requests.
    tie: largest difference of the two candidates' logits, in either run, that counts as a tie.
  """
  near_ties, equal = 0, True
  for request, left in first.items():
    parting = next(
      ((a, b) for a, b in zip(left, second[request], strict=False) if a.token != b.token), None
    )
    if parting is None:
      equal &= len(left) == len(second[request])
    elif _tied(parting[0], parting[1], tie) and _tied(parting[1], parting[0], tie):
      near_ties += 1
    else:
      equal = False
  return Agreement(equal=equal, near_ties=near_ties)


def _tied(chosen: TokenEvent, other: TokenEvent, tie: float) -> bool:
  logits = dict(zip(chosen.top_ids, chosen.top_logits, strict=True))
  if other.token not in logits or chosen.token not in logits:
    return False
  return abs(logits[chosen.token] - logits[other.token]) <= tie
