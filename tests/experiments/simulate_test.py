"""`python -m experiments.simulate`: the table, the last line and exit codes."""

import json
import subprocess
import sys

import pytest

from experiments.simulate import table
from jaxserve.engine import profiles
from tests.cost_profile_test import PROFILE

pytestmark = pytest.mark.one_leg


def simulate(*arguments):
  command = [sys.executable, "-m", "experiments.simulate", *map(str, arguments)]
  return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_trace_under_two_budgets(tmp_path):
  path = tmp_path / "trace.csv"
  lines = [f"2023-11-16 18:15:{i:02}.5000000,{100 * i},{i}" for i in range(1, 20)]
  path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines), "utf-8")
  done = simulate(
    "--trace", path, "--budget=64,256", "--max_num_seqs=8", "--max_model_len=1823",
    "--kv_cache_tokens=4000", "--seconds=30",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "1 of 19 requests left out: longer than max_model_len=1823" in done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert result["requests"] == 18 and result["lanes"] == 2
  assert [row["budget"] for row in result["results"]] == [64, 256]
  assert result["results"][0]["steps"] > result["results"][1]["steps"]
  assert "ITL max" in done.stdout and "simulated steps/s" in done.stdout
  assert result["commit"] and result["jax"]


def test_measured_costs_in_the_place_of_a_roofline(tmp_path):
  path = tmp_path / "profile.json"
  profiles.save(path, PROFILE)
  done = simulate(
    "--profile", path, "--requests=9", "--prompt=40", "--output=4", "--budget=64",
    "--max_num_seqs=8", "--max_model_len=100", "--kv_cache_tokens=1000",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "some on this, as measured" in done.stdout
  (row,) = json.loads(done.stdout.splitlines()[-1])["results"]
  assert row["p50_itl_ms"] > 1e3 * (PROFILE.costs.step_s + PROFILE.costs.weights_s)


def test_mistakes_exit_with_2_and_say_what_to_do(tmp_path):
  path = tmp_path / "trace.csv"
  path.write_text("hello\n", "utf-8")
  for arguments, message in (
    (["--trace", path], "trace.csv:1: format='hello': is unknown"),
    (["--trace", tmp_path / "none.csv"], "No such file"),
    (["--budget=8"], "max_budget=8: must be at least max_num_seqs=64"),
  ):
    done = simulate(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_table_leaves_out_what_nobody_has():
  rows = [{"policy": "a", "budget": 8, "p99_itl_ms": 3.14}, {"policy": "bb", "p99_itl_ms": None}]
  assert table.render(rows).splitlines() == [
    "policy  budget  ITL p99",
    "     a       8      3.1",
    "    bb       -        -",
  ]
  assert table.rounded({"budget": 8, "x": 1, "p99_itl_ms": 1.23456}) == {
    "budget": 8, "p99_itl_ms": 1.2346,
  }  # fmt: skip
