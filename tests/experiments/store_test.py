"""Sweeps that stop and go on."""

import json

import pytest

from experiments.store import Store, workload_digest
from jaxserve.workload import Workload

SETTINGS = [{"budget": budget} for budget in (1, 2, 3, 4)]
FIXED = {"load": "abc"}


def measure(folder, settings=SETTINGS, fixed=FIXED, fail_at=None, sources=()):
  """(rows, what was run)."""
  ran = []

  def run(setting):
    if setting["budget"] == fail_at:
      raise KeyboardInterrupt
    ran.append(setting["budget"])
    return {"twice": 2 * setting["budget"]}

  try:
    rows = Store(folder, sources).measure("Doubling", fixed, settings, run)
  except KeyboardInterrupt:
    rows = None
  return rows, ran


def test_a_sweep_that_was_stopped_runs_only_the_rest(tmp_path):
  assert measure(tmp_path, fail_at=3) == (None, [1, 2])
  rows, ran = measure(tmp_path)
  assert ran == [3, 4]
  assert rows == [{"budget": b, "twice": 2 * b} for b in (1, 2, 3, 4)]
  assert measure(tmp_path)[1] == []


def test_lines_say_where_they_come_from(tmp_path):
  measure(tmp_path)
  lines = (tmp_path / "results.jsonl").read_text().splitlines()
  assert len(lines) == 4
  for line in map(json.loads, lines):
    assert line["commit"] and line["jax"] and line["date"] and line["digest"]


def test_whatever_a_result_depends_on_makes_it_run_again(tmp_path):
  source = tmp_path / "run.py"
  source.write_text("a = 1\n")
  measure(tmp_path, sources=[source])
  assert measure(tmp_path, sources=[source])[1] == []
  assert measure(tmp_path, fixed={"load": "other"}, sources=[source])[1] == [1, 2, 3, 4]
  source.write_text("a = 2\n")
  assert measure(tmp_path, sources=[source])[1] == [1, 2, 3, 4]


def test_many_at_once_get_only_what_is_missing(tmp_path):
  measure(tmp_path, SETTINGS[1:2])
  seen = []

  def run(some):
    seen.append([one["budget"] for one in some])
    return [{"twice": 2 * one["budget"]} for one in some]

  rows = Store(tmp_path).measure_many("Doubling", FIXED, SETTINGS, run)
  assert seen == [[1, 3, 4]] and [row["twice"] for row in rows] == [2, 4, 6, 8]


def test_a_workload_is_told_by_its_numbers():
  load = Workload(arrival_s=[0.0, 1.0], num_prompt=[3, 4], num_output=[1, 2])
  assert workload_digest(load) == workload_digest(load.first(2))
  assert workload_digest(load) != workload_digest(load.faster(2.0))
  assert workload_digest(load) != workload_digest(load.first(1))


def test_rows_given_out_say_together_where_they_come_from(tmp_path):
  measure(tmp_path)
  path = tmp_path / "results.jsonl"
  rows = [json.loads(line) | {"commit": "abc"} for line in path.read_text().splitlines()]
  rows[0]["commit"] = "xyz"
  path.write_text("\n".join(map(json.dumps, rows)) + "\n")
  store = Store(tmp_path)
  store.measure("Doubling", FIXED, SETTINGS[1:], lambda setting: {})
  assert store.origin()["commit"] == "abc"
  store.measure("Doubling", FIXED, SETTINGS, lambda setting: {})
  assert store.origin()["commit"] == "abc, xyz"


@pytest.mark.parametrize("damage", ["", "\n\n"])
def test_empty_lines_are_passed_over(tmp_path, damage):
  measure(tmp_path)
  with (tmp_path / "results.jsonl").open("a") as file:
    file.write(damage)
  assert measure(tmp_path)[1] == []
