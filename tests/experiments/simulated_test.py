"""The experiments on small loads: what they must show, and that their pages are whole."""

import dataclasses

import numpy as np
import pytest

from experiments import case, flow, report, served
from experiments.budget_sweep import config as sweep_config
from experiments.budget_sweep import plot as sweep_plot
from experiments.budget_sweep import run as sweep_run
from experiments.disaggregation import config as split_config
from experiments.disaggregation import plot as split_plot
from experiments.disaggregation import run as split_run
from experiments.policies import config as policies_config
from experiments.policies import plot as policies_plot
from experiments.policies import run as policies_run
from experiments.sarathi_tables import closed_loop, published
from experiments.sarathi_tables import config as tables_config
from experiments.sarathi_tables import plot as tables_plot
from experiments.sarathi_tables import run as tables_run
from experiments.stall import config as stall_config
from experiments.stall import plot as stall_plot
from experiments.stall import run as stall_run
from experiments.store import Store
from experiments.threshold import config as threshold_config
from experiments.threshold import plot as threshold_plot
from experiments.threshold import run as threshold_run
from experiments.when_it_does_not_help import config as helps_config
from experiments.when_it_does_not_help import plot as helps_plot
from experiments.when_it_does_not_help import run as helps_run
from jaxserve import sim
from tests.experiments.report_test import Reader

pytestmark = pytest.mark.one_leg

SMALL = served.Server(seats=16, length=16_384, kv_tokens=120_000)


def check_page(page):
  """Every chart is drawn into one page that stands alone."""
  drawings = [report.draw(chart, with_png=False)[1] for chart in page.charts]
  reader = Reader(report.render(page, drawings, {"commit": "abc"}))
  assert reader.seen.count("svg") == len(page.charts) and not reader.outside
  assert all(chart.x_label and chart.y_label for chart in page.charts)
  assert len({chart.name for chart in page.charts}) == len(page.charts)
  assert page.findings and report.text_table(page.rows, page.columns)


@pytest.fixture
def trace(tmp_path):
  rng = np.random.default_rng(0)
  path = tmp_path / "trace.csv"
  rows = [
    f"2023-11-16 18:{i // 10:02}:{6 * (i % 10):02}.5000000,{rng.integers(20, 6000)},"
    f"{rng.integers(8, 40)}"
    for i in range(40)
  ]
  path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows), "utf-8")
  return str(path)


def test_a_larger_budget_makes_gaps_longer_and_a_second_run_simulates_nothing(
  trace, tmp_path, monkeypatch
):
  chosen = sweep_config.Config(server=SMALL, budgets=(128, 1024, 8192), trace=trace, speed=60.0)
  rows = sweep_run.run(chosen, Store(tmp_path))
  longest = [row["max_itl_ms"] for row in rows]
  assert longest[0] < longest[1] < longest[2]
  assert [row["budget"] for row in rows] == [128, 1024, 8192] and rows[0]["load"] == "trace"
  check_page(sweep_plot.page(chosen, rows))
  check_page(sweep_plot.page(dataclasses.replace(chosen, itl_slo_ms=1.0), rows))  # no budget does
  monkeypatch.setattr(sim, "sweep", None)
  assert sweep_run.run(chosen, Store(tmp_path)) == rows


def test_the_stall_of_the_reference_case(tmp_path):
  """facts: 1.6 s unchunked, 9.5 ms a decode, 134 ms for the last full chunk at 2,048."""
  chosen = stall_config.Config(budgets=(2048,))
  chunked, whole = stall_run.run(chosen, Store(tmp_path))
  np.testing.assert_allclose(whole["longest_gap_ms"], 1620, rtol=0.005)
  np.testing.assert_allclose(whole["decode_ms"], 9.48, rtol=0.005)
  np.testing.assert_allclose(chunked["longest_gap_ms"], 134.5, rtol=0.01)
  assert chunked["chunks"] == 17 and 165 < whole["spike"] < 175
  for row in (chunked, whole):
    np.testing.assert_allclose(row["longest_gap_ms"], row["predicted_longest_ms"], rtol=0.005)
    np.testing.assert_allclose(row["long_ttft_ms"], row["predicted_ttft_ms"], rtol=0.02)
  check_page(stall_plot.page(chosen, [chunked, whole]))


def test_whole_prompts_stall_longer_than_chunks(trace, tmp_path):
  chosen = policies_config.Config(
    server=SMALL, policies=("vllm_v1", "prefill_first"), traces=(trace,), rate=4.0
  )
  rows = policies_run.run(chosen, Store(tmp_path))
  chunks, whole = rows
  assert chunks["max_itl_ms"] < whole["max_itl_ms"]
  assert chunks["capacity_per_s"] >= whole["capacity_per_s"] > 0
  check_page(policies_plot.page(chosen, rows))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
  chosen = tables_config.Config(
    seeds=1, table_requests=60, table_rates=(("chat", 0.6),), table_budgets=(512,),
    capacity=False, closed_requests=96, concurrency=32, gpus=(1,),
  )  # fmt: skip
  return chosen, tables_run.run(chosen, Store(tmp_path_factory.mktemp("tables")))


def test_the_ordering_of_sarathis_table_4(tables):
  chosen, rows = tables
  table = [row for row in rows if row["part"] == "table 4"]
  assert all(tables_plot.table_4_holds(table, "chat", 512).values())
  check_page(tables_plot.page(chosen, rows))


def test_prefill_first_trades_the_first_token_for_the_gap_in_a_closed_loop(tables):
  _, rows = tables
  of = {row["variant"]: row for row in rows if row["part"] == "mixed"}
  mixed, first = of["mixed"], of["prefill first"]
  assert first["ttft_ms"] > 1.2 * mixed["ttft_ms"]
  assert first["p99_itl_ms"] <= mixed["p99_itl_ms"]
  assert first["tpot_ms"] < mixed["tpot_ms"]


def test_a_request_of_a_closed_loop_is_sent_when_another_ends():
  sent = closed_loop.sent_s(np.array([3.0, 1.0, 2.0, 9.0, 8.0]), 2)
  assert sent.tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]


def test_the_fit_to_published_iterations():
  """Within 12% of the prompts and 18% of the decodes, but for the two fastest batches."""
  c = published
  for tokens, ms in c.PREFILL_MS.items():
    fit = max(c.BASE_MS + c.TOKEN_MS * tokens, c.LEAST_MS) + c.PAIR_MS * tokens**2 / 2
    assert abs(fit / ms - 1) < 0.12
  for rows, ms in c.DECODE_MS.items():
    fit = max(c.BASE_MS + c.TOKEN_MS * rows, c.LEAST_MS) + c.ROW_MS * rows
    assert abs(fit / ms - 1) < 0.18


def test_chunking_does_nothing_for_uniform_short_prompts(tmp_path):
  chosen = helps_config.Config(
    server=SMALL, budgets=(512, 2048), requests=60, short_rate=5.0, short_prompt=175
  )  # fmt: skip
  rows = helps_run.run(chosen, Store(tmp_path))
  numbers = lambda load: [
    {k: v for k, v in row.items() if k not in ("budget", "chunked")}
    for row in rows
    if row["load"] == load
  ]
  small, large, whole = numbers(helps_run.UNIFORM)
  assert small == large == whole
  small, _, whole = numbers(helps_run.OFFLINE)
  assert abs(small["makespan_s"] / whole["makespan_s"] - 1) < 0.1
  small, _, whole = numbers(helps_run.MIXED)
  assert small["p99_worst_gap_ms"] < 0.2 * whole["p99_worst_gap_ms"]
  check_page(helps_plot.page(chosen, rows))


def test_a_threshold_lets_short_prompts_past_long_ones(tmp_path):
  chosen = threshold_config.Config(
    server=dataclasses.replace(SMALL, length=32_768, kv_tokens=400_000, seats=64),
    budgets=(1024,), thresholds=(0, 128), requests=80,
  )  # fmt: skip
  rows = threshold_run.run(chosen, Store(tmp_path))
  off, on = rows
  assert on["short_p99_ttft_ms"] < 0.7 * off["short_p99_ttft_ms"]
  assert on["long_p50_ttft_ms"] > off["long_p50_ttft_ms"]
  assert on["max_itl_ms"] < off["max_itl_ms"]
  check_page(threshold_plot.page(chosen, rows))


def test_two_pools_have_shorter_gaps_but_the_link_shows_in_the_second_token(tmp_path):
  chosen = split_config.Config(
    server=SMALL, gpus=2, prefill=(0, 1), link_prefill=1, links_gb_s=(1.0, 50.0), rates=(8.0,),
    requests=60, budget=2048, prefill_budget=2048,
  )  # fmt: skip
  rows = split_run.run(chosen, Store(tmp_path))
  mixed, split, slow, fast = rows
  assert split["p99_itl_ms"] < mixed["p99_itl_ms"]
  assert slow["p99_second_gap_ms"] > 10 * fast["p99_second_gap_ms"]
  assert slow["p99_ttft_ms"] == fast["p99_ttft_ms"] and mixed["p50_sent_ms"] is None
  check_page(split_plot.page(chosen, rows))


def test_list_flags_are_numbers_or_a_mistake_that_is_named():
  assert case.numbers("budget", ["512", "64", "512"]) == (64, 512)
  assert case.numbers("rate", ["2.5"], float) == (2.5,)
  with pytest.raises(ValueError, match="budget=1,x: must be whole numbers"):
    case.numbers("budget", ["1", "x"])


def test_an_experiment_from_flags_to_its_last_line(tmp_path, capsys):
  """flow.execute: table, findings, files, one JSON line; a mistake is one line and exit code 2."""
  home = tmp_path / "sample"
  home.mkdir()
  for name in ("__main__.py", "run.py", "config.py"):
    (home / name).write_text("")
  run = lambda config, store: store.measure("Trying", {}, [{"a": 1}], lambda s: {"b": config})
  page = lambda config, rows: report.Page(
    title="T", question="?", setup="S", findings=["found it"], columns=(("b", "b", "{}"),),
    rows=rows, charts=[],
  )  # fmt: skip
  main = str(home / "__main__.py")
  out = str(tmp_path / "out")
  assert flow.execute(main, [""], lambda: 7, run, page, out=out, record=False) == 0
  printed = capsys.readouterr().out
  assert "found it" in printed and printed.splitlines()[-1].startswith('{"experiment": "sample"')
  assert (tmp_path / "out" / "report.html").exists()
  assert flow.execute(main, [""], lambda: 7, run, page, out=None, record=True) == 0
  assert (home / "results" / "results.jsonl").exists()

  def wrong():
    raise ValueError("budget=0: too small")

  assert flow.execute(main, [""], wrong, run, page, out=out, record=False) == 2
  assert capsys.readouterr().err.strip().endswith("experiments.sample: budget=0: too small")
  assert flow.execute(main, ["", "word"], lambda: 7, run, page, out=out, record=False) == 2
