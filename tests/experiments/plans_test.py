"""`python -m experiments.plans`: output and exit codes. `tests/main_test.py` runs replay."""

import json
import subprocess
import sys

import pytest

from tests.replay import recorded

pytestmark = pytest.mark.one_leg


def plans(*arguments):
  command = [sys.executable, "-m", "experiments.plans", *map(str, arguments)]
  return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "steps.jsonl"
  path.write_text("".join(recorded.lines()), "utf-8")
  return path


def test_show_draws_in_the_terminal_and_to_files(file, tmp_path):
  done = plans("show", file, "--svg", tmp_path / "drawn" / "gantt.svg", "--width=100")
  assert done.returncode == 0, done.stderr
  assert "run 1: first, policy vllm_v1, budget=30" in done.stdout
  assert "run 2: second" in done.stdout and "█" in done.stdout and "tokens/budget" in done.stdout
  assert all("<svg xmlns" in (tmp_path / "drawn" / f"gantt-{i}.svg").read_text() for i in (1, 2))
  one = plans("show", f"{file}#2", "--svg", tmp_path / "one.svg")
  assert one.returncode == 0 and "first" not in one.stdout and (tmp_path / "one.svg").exists()


def test_diff_finds_the_first_difference(file, tmp_path):
  same = plans("diff", file, file)
  assert same.returncode == 0 and same.stdout.splitlines()[-1] == "equal"
  docs = [json.loads(line) for line in recorded.lines()]
  step = [doc for doc in docs if doc["event"] == "step"][5]
  step["requests"][1]["tokens"] += 1
  other = tmp_path / "other.jsonl"
  other.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
  done = plans("diff", file, other)
  assert done.returncode == 1 and done.stdout.splitlines()[-1] == "different"
  assert "first difference: step 5: requests[1].tokens: " in done.stdout
  two = plans("diff", f"{file}#1", f"{file}#2")
  assert two.returncode == 1 and "step 0: params.budget: 30 | 61" in two.stdout


def test_mistakes_exit_with_2(file, tmp_path):
  bad = tmp_path / "bad.jsonl"
  bad.write_text(file.read_text().replace('"version":1,', '"version":99,', 1))
  for arguments, words in (
    (["replay", bad], "version=99: this jaxserve reads version 1"),
    (["show", tmp_path / "none"], "cannot read it"),
    (["show", f"{file}#9"], "runs 1 to 2"),
    (["dance"], "unexpected arguments"),
  ):
    done = plans(*arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_a_file_that_was_cut_off_is_shown_with_a_note(file):
  file.write_text(file.read_text()[:-200])
  done = plans("show", file)
  assert done.returncode == 0 and "was cut off after" in done.stderr, done.stderr
