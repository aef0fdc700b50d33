import json

import pytest

from jaxserve import metrics
from jaxserve.replay import records
from tests.replay import synthetic


def _step(start, end, **changes):
  fields = {
    "step": 0, "start_s": start, "end_s": end, "budget": 16, "bucket": 8, "num_tokens": 6,
    "requests": (
      records.StepRequest(id="a", tokens=5, kind="prefill"),
      records.StepRequest(id="b", tokens=1, kind="decode"),
    ),
  }  # fmt: skip
  return records.StepRecord(**fields | changes)


def _request(name, arrival, *tokens, **changes):
  return records.RequestTrace(
    id=name, arrival_s=arrival, token_times_s=tokens, num_prompt=5, finish_reason="stop", **changes
  )


def _run(*requests, steps=()):
  return records.RunRecord(
    name="r", policy="fcfs", budget=16, chunked_prefill=True, steps=steps, requests=requests
  )


def test_step_counts_its_tokens():
  step = _step(0.0, 1.0)
  assert (step.tokens_of("prefill"), step.tokens_of("decode"), step.padding) == (5, 1, 2)


def test_run_begins_and_ends_with_anything():
  run = _run(_request("a", 2.0, 3.0), _request("b", 1.5, 5.0), steps=(_step(2.5, 4.0),))
  assert (run.start_s, run.end_s) == (1.5, 5.0)
  assert (_run().start_s, _run().end_s) == (0.0, 0.0)
  assert json.loads(json.dumps(run.to_dict()))["requests"][0]["id"] == "a"


def test_result_of_a_run():
  run = synthetic.make_run("chunked", 256)
  result = records.run_result(run)
  summary = metrics.summarize([request.times for request in run.requests])
  assert result["steps"] == len(run.steps)
  assert result["p99_itl_ms"] == pytest.approx(summary["p99_itl_ms"], abs=1e-4)
  assert result["long_prompt_ttft_ms"] == result["max_ttft_ms"]
  assert 0 < result["padding_fraction"] < 1
  json.dumps(result, allow_nan=False)


def test_result_leaves_the_warm_up_out_and_counts_preemptions():
  slow = _request("warm", 0.0, 9.0, 20.0, is_warmup=True)
  steps = (_step(0.0, 1.0, preempted=("a", "b")), _step(1.0, 2.0, preempted=("a",)))
  result = records.run_result(_run(slow, _request("a", 1.0, 1.5, 1.7), steps=steps))
  assert result["preemptions"] == 3 and result["padding_fraction"] == 0.25
  assert result["max_ttft_ms"] == 500 and result["longest_stall_ms"] == pytest.approx(200)
  assert result["long_prompt_ttft_ms"] is None


def test_result_of_an_empty_run():
  result = records.run_result(_run())
  assert result["steps"] == 0 and result["p50_ttft_ms"] is None
  assert result["padding_fraction"] == 0.0


def test_chunking_shortens_the_stall_and_costs_steps():
  chunked, unchunked = map(records.run_result, synthetic.both_runs())
  assert unchunked["longest_stall_ms"] > 3 * chunked["longest_stall_ms"]
  assert chunked["steps"] > unchunked["steps"]


def drafting_run():
  """Two verifications, 2 of 3 and 0 of 1 drafts right, a plain decode and a chunk."""
  row = dict(id="b", kind="decode", samples=True)
  steps = [
    _step(i, i + 1.0, requests=(records.StepRequest(**(row | fields)),))
    for i, fields in enumerate((
      dict(tokens=4, drafts=3, accepted=2), dict(tokens=2, drafts=1), dict(tokens=1),
      dict(tokens=5, kind="prefill"),
    ))
  ]  # fmt: skip
  return _run(_request("b", 0.0, 1.0), steps=steps)


def test_result_counts_drafts_where_there_are_some():
  result = records.run_result(drafting_run())
  assert (result["draft_tokens"], result["accepted_tokens"], result["acceptance_rate"]) == (
    4,
    2,
    0.5,
  )
  assert result["accepted_by_position"] == [1, 1]
  assert result["decode_tokens_per_step"] == pytest.approx(5 / 3, abs=1e-4)
  assert "draft_tokens" not in records.run_result(synthetic.make_run("chunked", 256))
