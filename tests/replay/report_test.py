import dataclasses
import re
from xml.etree import ElementTree

import pytest

from jaxserve.replay import charts, records, report
from tests.replay import synthetic
from tests.replay.records_test import drafting_run

SUMMARY = {"model": "tiny", "retraces": 0, "tokens_equal": True, "near_ties": 2}


def parse(page):
  """The page is written so that an XML parser reads it too."""
  return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def texts(root):
  return {"".join(node.itertext()) for node in root.iter()}


@pytest.fixture(scope="module")
def runs():
  return synthetic.both_runs()


@pytest.fixture(scope="module")
def page(runs):
  return report.render_report("A title", runs, SUMMARY)


def test_page_is_well_formed_and_loads_nothing(page):
  root = parse(page)
  assert root.find("head/title").text == "A title"
  assert len(root.findall("body//svg")) == 3
  assert not re.search(r"https?:|<script|<link|@import|url\(|\ssrc=|\shref=", page)


def test_every_request_is_a_row_in_every_run(page, runs):
  rows = parse(page).findall(".//g[@class='request']")
  names = [row.find("text").text for row in rows]
  assert names == [request.id for run in runs for request in run.requests]


def test_every_step_has_a_tooltip(page, runs):
  hovers = parse(page).findall(".//rect[@class='hover']")
  assert len(hovers) == sum(len(run.steps) for run in runs)
  assert hovers[0].find("title").text.startswith("step 0: ")


def test_every_chunk_of_the_long_prompt_is_drawn(runs):
  for run in runs:
    chunks = [s for s in charts._lives(run)["long"] if s.kind == "prefill"]
    served = [r for step in run.steps for r in step.requests if r.id == "long"]
    assert len(chunks) == sum(entry.kind == "prefill" for entry in served)


def test_table_shows_both_runs(page, runs):
  table = parse(page).find(".//table")
  cells = {row[0].text: [cell.text for cell in row[1:]] for row in table.findall("tbody/tr")}
  results = [records.run_result(run) for run in runs]
  assert cells["Longest stall of a stream"] == [
    f"{result['longest_stall_ms']:,.0f} ms" for result in results
  ]
  assert cells["Compilations after start-up"] == ["0", "0"]
  assert cells["Steps"] == [str(len(run.steps)) for run in runs]


def test_page_says_what_happened(page):
  shown = " ".join(texts(parse(page)))
  assert "a prompt of 4,096 tokens arrives" in shown
  assert "times longer" in shown and "H100" in shown and "near ties (2)" in shown


def test_many_policies_have_a_colour_each_and_are_explained():
  one = synthetic.both_runs()[0]
  names = ["vllm_v1", "sarathi", "prefill_first", "static"]
  runs = [dataclasses.replace(one, name=name, policy=name) for name in names]
  page = report.render_report("Policies", runs, SUMMARY)
  classes = {g.get("class") for g in parse(page).iter() if "run-" in (g.get("class") or "")}
  assert classes == {f"run run-{i}" for i in range(4)}
  for i in range(4):
    assert f".run-{i} path" in page and page.count(f"--run-{i}:") == 2  # light and dark
  assert "freezes every stream" in page and "fill: none" in page


def test_a_policy_that_is_not_the_default_is_told_in_its_own_words(runs):
  def shown(*policies):
    named = [dataclasses.replace(r, policy=p) for r, p in zip(runs, policies, strict=True)]
    return " ".join(texts(parse(report.render_report("t", named, SUMMARY))))

  assert "“sglang” computes chunks of prompts back to back" in shown("sglang", "sglang")
  assert "decodes draw from it first" not in shown("sglang", "sglang")
  assert "decodes draw from it first" in shown("vllm_v1", "vllm_v1")
  both = shown("sglang", "sglang_mixed")
  assert "every stream stands still" in both and "“sglang_mixed” lets the streams ride" in both


def test_text_is_escaped():
  odd = '"</svg><script>'
  specs = [(odd if spec[0] == "chat-1" else spec[0], *spec[1:]) for spec in synthetic.SHORT]
  run = synthetic.make_run("<b> & 'co'", 256, specs=specs)
  page = report.render_report("<i>", [run], {"model": "<m>"})
  assert "<script>" not in page and "<b>" not in page and "<m>" not in page
  assert {"<b> & 'co'", odd, "<i>", "<m>"} <= texts(parse(page))


def test_waiting_preemption_and_never_served():
  entry = records.StepRequest(id="a", tokens=1, kind="decode")
  step = records.StepRecord(
    step=0, start_s=1.0, end_s=2.0, budget=4, bucket=1, num_tokens=1, requests=(entry,)
  )
  steps = [
    step,
    dataclasses.replace(step, step=1, start_s=1.5, end_s=3.0),  # dispatched early
    dataclasses.replace(step, step=2, start_s=3.0, end_s=4.0, requests=(), preempted=("a",)),
    dataclasses.replace(step, step=3, start_s=4.0, end_s=5.0),
  ]
  requests = [
    records.RequestTrace(
      id=name, arrival_s=0.0, token_times_s=tokens, num_prompt=1, finish_reason=None
    )
    for name, tokens in (("a", (2.0, 3.0, 5.0)), ("b", ()))
  ]
  run = records.RunRecord(
    name="r", policy="fcfs", budget=4, chunked_prefill=True, steps=steps, requests=requests
  )
  lives = charts._lives(run)
  assert [(s.kind, s.start, s.end) for s in lives["a"]] == [
    ("waiting", 0, 1), ("decode", 1, 3), ("waiting", 3, 4), ("decode", 4, 5),
  ]  # fmt: skip
  assert [(s.kind, s.start, s.end) for s in lives["b"]] == [("waiting", 0, 5)]
  root = parse(report.render_report("t", [run], {}))
  assert len(root.findall(".//text[@class='preempted']")) == 1
  assert "× preempted" in " ".join(texts(root))


def test_victim_is_a_short_stream_that_stalled_midway(runs):
  stream = report._victim(runs)
  assert stream.startswith("chat-") and stream not in ("chat-0", "chat-1", "chat-7")


def test_empty_run_renders():
  empty = records.RunRecord(
    name="empty", policy="fcfs", budget=16, chunked_prefill=True, steps=(), requests=()
  )
  shown = texts(parse(report.render_report("t", [empty, empty], {})))
  assert "–" in shown and "What one reader sees" not in shown


def test_table_has_drafts_where_a_run_has_some(runs):
  page = report.render_report("Drafts", [drafting_run(), runs[0]], {})
  cells = [[cell.text for cell in row] for row in parse(page).findall(".//table/tbody/tr")]
  assert ["Accepted of them", "50.0%", "–"] in cells
  assert ["Tokens of a stream per step", "1.67", "–"] in cells
