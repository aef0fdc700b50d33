"""A recording executed again: equal bit by bit, and every tampering is found where it is."""

import dataclasses
import json
import types

import pytest

from jaxserve import sched
from jaxserve.config import SplitKV
from jaxserve.replay import differences, recording, replaying, timeline
from jaxserve.replay.codec import RecordingError
from tests.replay import recorded
from tests.replay.report_test import parse as parse_xml
from tests.testing.caches import cache_dir
from tests.testing.engines import MODEL, SCHEDULER, weights


def changed(kind, number, change):
  """The recording with line `number` of a kind of the first run changed, and its after_step."""
  docs = [json.loads(line) for line in recorded.lines()]
  doc = [doc for doc in docs if doc["event"] == kind][number]
  change(doc)
  return recording.parse("".join(json.dumps(doc) + "\n" for doc in docs)), doc


def put(*path, value):
  def change(doc):
    for key in path[:-1]:
      doc = doc[key]
    doc[path[-1]] = value

  return change


def test_replay_is_equal_bit_by_bit_and_leaves_the_engine_as_it_was():
  engine, record = recorded.engine(), recorded.record()
  params = engine.params
  for _ in range(2):
    assert replaying.replay(record, engine) is None
  assert engine.retraces == 0 and engine.params is params and engine.listener is None
  assert engine.is_idle and engine.num_free_pages == SCHEDULER.cache.num_pages


def test_a_used_engine_replays_the_same():
  """Neither its free pages' order, nor its own seeds, nor request numbers matter."""
  engine = recorded.engine()
  engine.generate([[1] * 40, [2] * 17, [3] * 9])
  recorded.run_dry(engine)
  assert replaying.replay(recorded.record(), engine) is None


# Line and change -> the field named; the step is the line's own unless it is given.
TAMPERED = {
  "logits": (("step", 6, put("logits", value="0" * 16)), "logits", 6),
  "token": (("step", 4, put("outputs", 0, "token", value=60)), "outputs[0].token", 4),
  "tokens": (("step", 1, put("requests", 0, "tokens", value=1)), "requests[0].tokens", 1),
  "order": (("step", 5, lambda doc: doc["requests"].reverse()), "requests[0].id", 5),
  "pages": (("step", 0, put("requests", 0, "new_pages", value=9)), "requests[0].new_pages", 0),
  "bucket": (("step", 9, put("bucket", value=61)), "bucket", 9),
  "rows": (("step", 3, put("rows", value=8)), "rows", 3),
  "admitted": (("step", 0, put("admitted", value=[])), "admitted[0]", 0),
  "preempted": (("step", 0, put("preempted", value=["long-0"])), "preempted[0]", 0),
  "reason": (("finish", 0, put("reason", value="length")), "finish 'r7'.reason", None),
  "prompt": (("submit", 0, put("prompt", 0, value=0)), "outputs", None),
  "seed": (("submit", 5, put("sampling", "seed", value=8)), "outputs", None),
  "params": (("params", 1, put("params", "budget", value=8)), "budget", None),
  "refused": (("submit", 0, put("prompt", 0, value=61)), "submit 'long-0'", 0),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tampering_is_found(name):
  (kind, number, change), field, step = TAMPERED[name]
  record, doc = changed(kind, number, change)
  engine = recorded.engine()
  found = replaying.replay(record, engine)
  assert found is not None and found.field.startswith(field), found
  assert step is None or found.step == step
  assert str(found).startswith(f"step {found.step}: {found.field}: ")
  assert engine.is_idle and engine.num_free_pages == SCHEDULER.cache.num_pages


def test_a_missing_line_and_a_run_that_goes_on_are_found():
  lines = [line for line in recorded.lines() if '"event":"finish","id":"seeded"' not in line]
  found = replaying.replay(recording.parse("".join(lines)), recorded.engine())
  assert found.field == "finish 'drawn'.id" and found.right == "seeded"
  record = recorded.record()
  early = dataclasses.replace(record.runs[1], events=record.runs[1].events[:-3])
  record = dataclasses.replace(record, runs=[early])
  found = replaying.replay(record, recorded.engine())
  assert (found.left, found.right) == ("nothing", "the engine goes on")


def test_a_recording_that_was_cut_off_is_replayed_as_far_as_it_goes():
  record = recording.parse("".join(recorded.lines()[:20]))
  assert not record.runs[0].complete
  engine = recorded.engine()
  assert replaying.replay(record, engine) is None and engine.is_idle


def test_an_engine_of_other_shapes_or_another_loop_is_refused():
  record = recorded.record()
  config = dataclasses.replace(record.header.config, overlap=False)
  record = dataclasses.replace(record, header=dataclasses.replace(record.header, config=config))
  with pytest.raises(RecordingError, match="config.overlap=False in the recording, True in the"):
    replaying.replay(record, recorded.engine())


def test_a_recording_from_a_gpu_is_read_but_not_replayed_on_a_cpu(monkeypatch):
  header = recorded.record().header
  there = dataclasses.replace(
    header.config, attention="mosaic_gpu", splits=SplitKV(capacity=33), query_tile=128
  )
  line = recording.to_line(dataclasses.replace(header, config=there))
  header = recording.parse(line).header
  assert header.config == there
  checkpoint = types.SimpleNamespace(config=MODEL, params=weights())
  monkeypatch.setattr(replaying.source, "load_checkpoint", lambda *args: checkpoint)
  with pytest.raises(RecordingError, match=r"config.attention='mosaic_gpu': platform 'cpu'"):
    replaying.build_engine(header, cache_dir())


def test_a_recording_without_splits_has_none():
  doc = json.loads(recorded.lines()[0])
  assert doc["config"].pop("splits", "missing") is None
  assert recording.parse(json.dumps(doc) + "\n").header == recorded.record().header


def test_other_versions_and_devices_are_warned_of():
  header = recorded.record().header
  assert replaying.cautions(header) == []
  device = dataclasses.replace(header.device, cores=header.device.cores + 1)
  other = dataclasses.replace(header, versions=dict(header.versions, jax="0.0.1"), device=device)
  jax_line, cores_line = replaying.cautions(other)
  assert jax_line.startswith("versions.jax='0.0.1' in the recording")
  assert cores_line.startswith("device.cores=") and "not promised" in cores_line


def test_engine_of_another_model_is_refused(tmp_path):
  header = dataclasses.replace(recorded.record().header, model="random")
  with pytest.raises(RecordingError, match="model='random': vocab_size is 259, .* it was 61"):
    replaying.build_engine(header, tmp_path)


@pytest.mark.parametrize(
  ("change", "message"),
  [(dict(budget=62), r"params.budget=62: must be in \[1, 61\]"), (dict(mood=1), r"\['mood'\]")],
)
def test_params_out_of_range_are_refused(change, message):
  params = dict(recorded.record().header.params) | change
  with pytest.raises(RecordingError, match=message):
    replaying.make_params(params, SCHEDULER)


def test_params_survive():
  params = sched.make_params(SCHEDULER, budget=9, watermark=0.3)
  again = replaying.make_params(recorded.record().header.params | {"budget": 9}, SCHEDULER)
  assert again.budget == params.budget and again.budget.dtype == params.budget.dtype
  assert again.chunked_prefill.dtype == params.chunked_prefill.dtype


def test_equal_runs_have_no_difference_whenever_they_ran():
  left = recorded.record().runs[0]
  right, _ = changed("step", 0, put("start_s", value=0.5))
  assert differences.first_difference(left, right.runs[0]) is None
  assert "0 of" not in differences.agreement(left, right.runs[0])


def test_first_difference_of_two_runs():
  left = recorded.record().runs[0]
  tampered, _ = changed("submit", 1, put("prompt", 3, value=0))
  found = differences.first_difference(left, tampered.runs[0])
  assert (found.step, found.field) == (0, "submit 'long-1'.prompt[3]") and found.right == 0
  assert differences.first_step_difference(left, tampered.runs[0]) is None
  shorter = dataclasses.replace(left, events=left.events[:-1])
  found = differences.first_difference(left, shorter)
  assert (found.step, found.field, found.right) == (len(left.steps), "event", "nothing")
  other = dataclasses.replace(left, params=dict(left.params, budget=31))
  assert differences.first_difference(left, other).field == "params.budget"


def test_summary_counts():
  left, right = recorded.record().runs
  rows = {what: (a, b) for what, a, b in differences.summary(left, right)}
  assert rows["steps"] == (str(len(left.steps)), str(len(right.steps)))
  assert rows["requests"] == ("8", "3") and rows["output tokens"][1] == "12"
  assert differences.agreement(left, left).startswith(f"{len(left.steps)} of {len(left.steps)}")


def test_settings_that_differ_are_listed():
  header = recorded.record().header
  config = dataclasses.replace(header.config, overlap=False)
  other = dataclasses.replace(header, config=config, seed=1, salt="0")
  assert differences.header_differences(header, other) == [
    "config.overlap: True | False",
    "seed: 0 | 1",
  ]


def test_timeline_shows_every_request_and_the_budget():
  run = recorded.record().runs[1]  # prompts of 33, 30 and 17 tokens, unchunked, budget 61
  lines = timeline.text(run, 80).splitlines()
  rest = " " * 14 + "│"
  assert lines[0] == "budget 61 tokens a step" and lines[1].startswith("tokens/budget │")
  used = [step.num_tokens for step in run.steps]
  assert [line.startswith(rest) for line in lines[2:5]] == [True] * 3
  assert len(lines[4]) == len(rest) + len(used)
  cells = {line.split()[0]: line.split("│")[1] for line in lines[5:8]}
  assert cells == {"r0": "█───", "r1": "·█───", "r2": "·█───"} and used[:2] == [33, 48]
  assert lines[-1] == timeline.LEGEND
  text = timeline.text(recorded.record().runs[0], 80)
  assert "×" in text and "budget 9 to 30 tokens" in text


def test_timeline_fits_its_width():
  run = recorded.record().runs[0]
  text = timeline.text(run, 40)
  lines = text.splitlines()[:-1]
  assert " a column" in lines[-1] and all(len(line) <= 40 for line in lines[:-1])
  assert timeline.text(dataclasses.replace(run, events=[])) == "no step"


def test_drawing_is_an_svg_file_with_a_row_for_every_request():
  run = recorded.record().runs[0]
  root = parse_xml(timeline.drawing(run))
  space = "{http://www.w3.org/2000/svg}"
  assert root.tag == f"{space}svg" and root[0].tag == f"{space}style"
  rows = [g for g in root.iter(f"{space}g") if g.get("class") == "request"]
  assert len(rows) == 8
