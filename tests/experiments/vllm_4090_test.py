"""The comparison with a recorded run, on tables and requests made here."""

import dataclasses
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.store import Store
from experiments.vllm_4090 import config, plot, profile, run
from tests.experiments.simulated_test import check_page
from tests.sim.load_test import load

pytestmark = pytest.mark.one_leg

CHUNK, PREFIX, DECODES, CONTEXT = (0, 16, 64), (0, 32, 256), (0, 1, 4), (0, 16, 128)


def micros(chunk, prefix, decodes, context):
  return 2.0 * chunk + 0.5 * prefix + 3.0 * decodes + 0.25 * context


@pytest.fixture
def traces(tmp_path):
  lines = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
  for point in itertools.product(CHUNK, PREFIX, DECODES, CONTEXT):
    chunk, prefix, decodes, context = point
    left_out = (not chunk and prefix) or (not decodes) != (not context) or not (chunk or decodes)
    if not left_out and not (chunk and decodes == 4):
      lines.append(",".join(map(str, (*point, micros(*point)))))
  (tmp_path / f"{config.STEM}_profile_attention.csv").write_text("\n".join(lines))
  for name, size, operators in (
    ("dense", "tokens", (*profile.IN_LAYER, *profile.ONCE)),
    ("per_sequence", "sequences", profile.PER_SEQUENCE),
  ):
    rows = [f"{operator},{n},{10.0 + n}" for operator in operators for n in (1, 8, 64)]
    text = "\n".join([f"layer,{size},time_us", *rows])
    (tmp_path / f"{config.STEM}_profile_{name}.csv").write_text(text)
  requests = [
    {
      "input_toks": 20 + i, "output_toks": 3, "arrival_time": 100.0 + i,
      "queued_ts": 5.0 + i, "first_token_ts": 5.01 + i, "last_token_ts": 5.03 + i,
    }
    for i in range(6)
  ]  # fmt: skip
  text = "\n".join(map(json.dumps, requests))
  (tmp_path / f"{config.STEM}_vllm_requests.jsonl").write_text(text)
  return tmp_path


def test_step_times_are_the_tables_entries(traces):
  seconds = profile.step_time(traces, config.STEM, 1)
  dense = lambda tokens: (8 + 2) * (10 + tokens)
  for chunk, prefix, decodes, context in ((16, 32, 1, 128), (64, 0, 0, 0), (0, 0, 4, 16)):
    rows = [(chunk, prefix)] if chunk else []
    # The tables give a chunk's keys by its prefix alone; half of the chunk is in attended.
    found = seconds(load(rows, [context] * decodes))
    expected = dense(chunk + decodes) + micros(chunk, prefix, decodes, context if decodes else 0)
    np.testing.assert_allclose(found, 1e-6 * expected, rtol=1e-5)


def test_decodes_that_were_not_measured_beside_a_chunk(traces):
  """They take as much more than fewer ones as they do alone: 9 us from one to four."""
  table = profile.attention_table(profile.path_of(traces, config.STEM, "attention"), 1)
  np.testing.assert_allclose(1e6 * table(16.0, 32.0, 4.0, 16.0), micros(16, 32, 4, 16), rtol=1e-5)


def test_several_fresh_prompts_see_fewer_keys_than_one_chunk(traces):
  seconds = profile.step_time(traces, config.STEM, 1)
  assert seconds(load([(16, 0)] * 4)) < seconds(load([(64, 0)]))
  made = dataclasses.replace(load([(16, 0)]), samples=jnp.arange(64) < 1)
  np.testing.assert_allclose(seconds(made) - seconds(load([(16, 0)])), 22e-6, rtol=1e-3)


def test_from_files_to_a_page(traces, tmp_path, monkeypatch):
  monkeypatch.setattr(run, "VARIANTS", run.VARIANTS[:1])
  chosen = config.Config(
    traces_dir=str(traces), pages=64, seats=4, budget=64, length=64, layers=2
  )  # fmt: skip
  rows = run.run(chosen, Store(tmp_path / "out"))
  assert [row["name"] for row in rows][0] == run.MEASURED
  np.testing.assert_allclose(rows[0]["p50_ttft_s"], 0.01, rtol=1e-3)
  np.testing.assert_allclose(rows[0]["makespan_s"], 5.03, rtol=1e-6)
  assert abs(rows[1]["error_makespan_s"]) < 0.01 and rows[1]["preemptions"] == 0
  check_page(plot.page(chosen, rows))


def test_a_missing_column_is_named(traces):
  path = profile.path_of(traces, config.STEM, "dense")
  path.write_text("layer,time_us\na,1")
  with pytest.raises(ValueError, match="dense.csv:1: tokens is missing"):
    profile.step_time(traces, config.STEM, 1)
  requests = traces / f"{config.STEM}_vllm_requests.jsonl"
  requests.write_text('{"input_toks": 1, "output_toks": 1, "arrival_time": 0}')
  with pytest.raises(ValueError, match="queued_ts=None: a time in seconds is needed"):
    run.recorded(requests)
