"""What the comparison with Vidur does on our side; Vidur itself is not installed for tests."""

import csv

import numpy as np
import pytest

from experiments.vidur import run
from jaxserve import workload


def _load():
  return workload.Workload(
    arrival_s=np.array([0.0, 0.5, 0.5]), num_prompt=np.array([100, 700, 3]),
    num_output=np.array([5, 2, 4]),
  )  # fmt: skip


def test_the_trace_has_vidurs_columns(tmp_path):
  run.write_trace(_load(), tmp_path / "trace.csv")
  with (tmp_path / "trace.csv").open() as file:
    rows = list(csv.DictReader(file))
  assert [int(row["PromptTokenCount"]) for row in rows] == [100, 700, 3]
  assert [int(row["CompletionTokenCount"]) for row in rows] == [5, 2, 4]
  assert [float(row["Time"]) for row in rows] == [0.0, 0.5, 0.5]
  assert {row["Date"] for row in rows} == {"all"}


def test_our_side_counts_the_steps():
  row = run.ours(_load(), budget=512)
  # The first request: a prompt step and 4 decodes; then 700 + 3 tokens in two steps, and decodes.
  assert row["steps"] == 10
  assert 0.5 < row["end_s"] < 0.7 and row["seconds"] > 0


def test_an_interpreter_without_vidur_is_an_error():
  with pytest.raises(RuntimeError, match="vidur ended with 1"):
    run.vidurs("/usr/bin/python3", _load(), budget=512)
