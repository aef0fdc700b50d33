"""Comparing the streams of two runs: equal, parted at a tie, or different."""

import pytest

from jaxserve.engine.request import TokenEvent
from jaxserve.replay import recording, runner
from jaxserve.replay.recorder import Recorder
from jaxserve.replay.workload import Arrival
from tests.testing.engines import MODEL, idle_engine, plain_greedy, weights


def token(token, logits):
  ids, values = zip(*sorted(logits.items(), key=lambda item: -item[1]), strict=True)
  return TokenEvent(request_id=0, token=token, logprob=0.0, top_ids=ids, top_logits=values)


SAME = token(5, {5: 2.0, 6: 1.0})
CASES = {
  "equal": ([SAME, SAME], [SAME, SAME], (True, 0)),
  "shorter": ([SAME, SAME], [SAME], (False, 0)),
  "near_tie": ([SAME, token(5, {5: 2.0, 6: 1.95})], [SAME, token(6, {6: 2.01, 5: 2.0})], (True, 1)),
  "far_in_one": ([token(5, {5: 2.0, 6: 1.95})], [token(6, {6: 2.5, 5: 2.0})], (False, 0)),
  "unseen": ([token(5, {5: 2.0, 7: 1.99})], [token(6, {6: 2.0, 5: 1.99})], (False, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_agreement(name):
  left, right, expected = CASES[name]
  agreement = runner.compare({"a": left, "b": [SAME]}, {"a": right, "b": [SAME]})
  assert (agreement.equal, agreement.near_ties) == expected


def test_run_serves_every_arrival_and_records_every_step():
  engine = idle_engine(budget=9)
  arrivals = [
    Arrival(id="a", at_s=0.0, prompt=(1, 2, 3), max_tokens=6),
    Arrival(id="long", at_s=0.01, prompt=tuple(range(40)), max_tokens=2, is_long_prompt=True),
    Arrival(id="late", at_s=0.2, prompt=(4,), max_tokens=1),
  ]
  events = []
  recorder = Recorder(engine, "tiny", events.append)
  record, outputs = runner.run(recorder, arrivals, "name", "vllm_v1")
  for arrival in arrivals:
    expected = plain_greedy(weights(), MODEL, arrival.prompt, arrival.max_tokens)
    assert tuple(e.token for e in outputs[arrival.id]) == expected
  assert [len(r.token_times_s) for r in record.requests] == [6, 2, 1]
  assert [r.finish_reason for r in record.requests] == ["length"] * 3
  assert all(r.token_times_s[0] >= r.arrival_s for r in record.requests)
  assert record.long_prompt.id == "long"
  assert sum(s.tokens_of("prefill") for s in record.steps) == 3 + 40 + 1
  assert all(s.num_tokens <= 9 == s.budget for s in record.steps)
  assert engine.is_idle and engine.retraces == 0
  (run,) = recording.parse("".join(map(recording.to_line, events))).runs
  assert (run.name, run.complete) == ("name", True) and list(run.steps) == record.steps
  assert {name: len(tokens) for name, tokens in run.tokens.items()} == {
    "a": 6,
    "long": 2,
    "late": 1,
  }


def test_a_run_after_one_that_ended_by_a_stop_token_starts_afresh():
  """The step in flight for whoever stopped belongs to the run that scheduled it."""
  engine, prompt = idle_engine(), (1, 2, 3)
  first = plain_greedy(weights(), MODEL, prompt, 1)
  recorder = Recorder(engine, "tiny", lambda event: None)
  object.__setattr__(engine.config, "eos_token_ids", first)
  try:
    for _ in range(2):
      arrivals = [Arrival(id="a", at_s=0.0, prompt=prompt, max_tokens=9)]
      record, outputs = runner.run(recorder, arrivals, "name", "vllm_v1")
      assert [event.finish_reason for event in outputs["a"]] == ["stop"]
      assert [step.num_tokens for step in record.steps] == [3, 1] and engine.is_idle
  finally:
    object.__setattr__(engine.config, "eos_token_ids", ())
