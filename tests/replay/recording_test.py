"""The file: what is in it, what is refused, and what a reader is told."""

import hashlib
import json
import re
import struct

import pytest

import jaxserve
from jaxserve.engine import SamplingParams
from jaxserve.engine.request import TokenEvent
from jaxserve.replay import recording
from jaxserve.replay.codec import RecordingError
from jaxserve.replay.recorder import Recorder, logits_digest
from jaxserve.replay.records import StepRecord
from tests.replay import recorded
from tests.testing.engines import MODEL


def documents():
  return [json.loads(line) for line in recorded.lines()]


def text(docs):
  return "".join(json.dumps(doc) + "\n" for doc in docs)


def test_every_kind_of_event_happens_and_survives_the_file():
  assert {doc["event"] for doc in documents()} == set(recording.KINDS)
  record = recorded.record()
  assert record.notes == [] and [run.name for run in record.runs] == ["first", "second"]
  first, second = record.runs
  again = [recording.to_line(event) for event in first.events]
  assert set(again) <= set(recorded.lines()) and all(run.complete for run in record.runs)
  assert sum(len(step.preempted) for step in first.steps) > 0
  reasons = {e.id: e.reason for e in first.events if isinstance(e, recording.Finish)}
  assert reasons["r7"] == "stop" and reasons["seeded"] == "length" and "long-2" not in reasons
  assert (first.params["budget"], second.params["budget"]) == (30, 61)
  assert second.params["chunked_prefill"] is False and list(second.tokens) == ["r0", "r1", "r2"]


def test_header_holds_what_an_engine_is_built_from():
  header = recorded.record().header
  assert header.config.model == MODEL and header.config.buckets == (2, 8, 24, 61)
  assert header.versions["jaxserve"] == jaxserve.__version__ and header.salt == recorded.SALT
  events = []
  for _ in range(2):
    Recorder(recorded.engine(), "tiny", events.append)
  assert events[0].salt != events[1].salt and re.fullmatch("[0-9a-f]{32}", events[0].salt)


def test_version_is_the_packages():
  import pathlib
  import tomllib

  project = pathlib.Path(jaxserve.__file__).parents[1] / "pyproject.toml"
  assert tomllib.loads(project.read_text())["project"]["version"] == jaxserve.__version__


def test_steps_add_up():
  for run in recorded.record().runs:
    for number, step in enumerate(run.steps):
      assert step.step == number and step.num_tokens == sum(r.tokens for r in step.requests)
      assert step.num_tokens <= min(step.budget, step.bucket)
      assert len(step.outputs) <= step.rows or not any(r.samples for r in step.requests)
      assert (step.logits is None) == (not step.outputs)
    done = {}
    for step in run.steps:
      done |= dict.fromkeys(step.preempted, 0)
      for entry in step.requests:
        assert entry.start == done.get(entry.id, 0) or entry.start == 0
        done[entry.id] = entry.start + entry.tokens


def test_pages_handed_out_hold_the_tokens():
  (_, run) = recorded.record().runs  # nobody is preempted
  pages = {}
  for step in run.steps:
    for entry in step.requests:
      pages[entry.id] = pages.get(entry.id, 0) + entry.new_pages
      assert pages[entry.id] == -(-(entry.start + entry.tokens) // 5)


def test_a_seed_that_the_engine_picked_is_recorded():
  submits = {e.id: e for e in recorded.record().runs[0].events if isinstance(e, recording.Submit)}
  assert submits["seeded"].sampling.seed == 7 and submits["seeded"].priority == -1
  assert 0 <= submits["drawn"].sampling.seed < 2**32
  assert submits["r7"].sampling.seed == 2**33 + 1
  assert submits["r7"].sampling.stop_token_ids == tuple(range(40))
  assert [submits[f"long-{i}"].after_step for i in range(2)] == [-1, -1]
  assert submits["seeded"].after_step == 2


def test_logits_digest_is_the_documented_one():
  event = TokenEvent(request_id=0, token=3, logprob=-0.5, top_ids=(3, 1), top_logits=(2.0, 1.5))
  expected = hashlib.sha256(2 * struct.pack("<iifff", 3, 1, 2.0, 1.5, -0.5)).hexdigest()[:16]
  assert logits_digest([event, event]) == expected and logits_digest([]) is None


def test_a_run_as_the_report_draws_it():
  run = recorded.record().runs[0]
  record = run.record()
  traces = {request.id: request for request in record.requests}
  assert traces["long-2"].finish_reason == "abort" and traces["r7"].finish_reason == "stop"
  assert len(traces["seeded"].token_times_s) == 9 and traces["seeded"].num_prompt == 3
  assert record.budget == 30 and len(record.steps) == len(run.steps)


def broken(change):
  docs = documents()
  change(docs)
  return text(docs)


def put(line, key, value):
  return lambda docs: docs[line].__setitem__(key, value)


REFUSED = {
  "version": (put(0, "version", 99), r"version=99: this jaxserve reads version 1"),
  "no_version": (lambda docs: docs[0].pop("version"), "version=None"),
  "schema": (put(0, "schema", "other"), "schema='other'"),
  "not_a_header": (lambda docs: docs.pop(0), "line 1: schema=None"),
  "unknown_event": (put(2, "event", "dance"), "line 3: event='dance': must be one of run, params"),
  "missing_field": (lambda docs: docs[4].pop("id"), "line 5: submit: .*'id' is missing"),
  "wrong_type": (put(4, "prompt", "abc"), "line 5: submit.prompt='abc': must be a list"),
  "a_bool_is_no_number": (put(4, "priority", True), "submit.priority=True: must be int"),
  "bad_option": (lambda docs: docs[4]["sampling"].__setitem__("top_p", 7.0), "top_p=7.0"),
  "lost_line": (lambda docs: docs.pop(next(
    i for i, d in enumerate(docs) if d["event"] == "step")), "a line was lost"),
  "same_name": (lambda docs: docs[4].__setitem__("id", docs[3]["id"]), "this run has it already"),
  "unknown_name": (lambda docs: next(
    d for d in docs if d["event"] == "step")["outputs"].append({"id": "who", "token": 1}),
    "names the request 'who'"),
  "outside": (lambda docs: docs.pop(1), "line 2: 'params' outside of a run"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_by_line_and_field(name):
  change, message = REFUSED[name]
  with pytest.raises(RecordingError, match=message):
    recording.parse(broken(change))


def test_a_field_that_a_later_jaxserve_added_is_passed_over():
  assert recording.parse(broken(put(4, "mood", "good"))).runs == recorded.record().runs


def test_a_last_line_that_was_cut_off_is_left_out_and_said():
  whole = "".join(recorded.lines())
  steps = len(recorded.record().runs[1].steps)
  cut = whole[: whole.rindex('{"event":"step"') + 30]
  record = recording.parse(cut)
  assert record.notes == [
    f"line {len(cut.splitlines())} was cut off after 30 characters; it is left out",
    f"run 'second' has no end line: the recording stopped after step {steps - 2}",
  ]
  assert record.runs[0].complete and len(record.runs[1].steps) == steps - 1


def test_a_broken_line_in_the_middle_is_an_error():
  middle = list(recorded.lines())
  middle[7] = middle[7][:20] + "\n"
  with pytest.raises(RecordingError, match="line 8: not JSON"):
    recording.parse("".join(middle))
  for empty in ("", '{"event":'):
    with pytest.raises(RecordingError, match="no complete line"):
      recording.parse(empty)


def test_a_file_that_is_not_there(tmp_path):
  with pytest.raises(RecordingError, match="cannot read it"):
    recording.read(tmp_path / "none.jsonl")


def test_recorder_wants_an_idle_engine_of_its_own_and_names_that_are_free():
  engine, events = recorded.engine(), []
  recorder = Recorder(engine, "tiny", events.append)
  with recorder.run("one", "vllm_v1"):
    recorder.submit("a", [1], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="name='a'"):
      recorder.submit("a", [1])
    with pytest.raises(ValueError, match="prompt: is empty"):
      recorder.submit("b", [])
    assert not recorder.abort("b")
  assert isinstance(events[-1], recording.Submit)  # what was refused left no line, and no end
  with pytest.raises(RuntimeError, match="idle"), recorder.run("two", "vllm_v1"):
    pass
  recorded.run_dry(engine)
  with recorder.run("two", "vllm_v1"):
    with pytest.raises(RuntimeError, match="listener"), recorder.run("three", "vllm_v1"):
      pass
  assert not any(isinstance(event, StepRecord) for event in events)
