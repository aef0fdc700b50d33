import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import metrics


def request(name, arrival, *tokens, prompt=7, reason="stop"):
  return metrics.RequestTimes(
    request_id=name, arrival_s=arrival, token_times_s=tokens, num_prompt=prompt,
    finish_reason=reason,
  )  # fmt: skip


STEADY = request("steady", 1.0, 1.5, 1.6, 1.7)
STALLED = request("stalled", 0.0, 0.25, 0.35, 2.35, 2.45, prompt=11, reason="length")
SINGLE = request("single", 2.0, 2.125)
ABORTED = request("aborted", 0.5, 0.6, 4.0, reason="abort")
SILENT = request("silent", 0.5, reason=None)
ALL = (STEADY, STALLED, SINGLE, ABORTED, SILENT)


def test_formulas_of_one_request():
  assert metrics.ttft_s(STALLED) == 0.25
  np.testing.assert_allclose(metrics.itl_s(STALLED), [0.1, 2.0, 0.1])
  assert metrics.tpot_s(STALLED) == pytest.approx(2.2 / 3)
  assert metrics.e2e_s(STALLED) == 2.45


def test_one_token_has_no_gap():
  assert metrics.itl_s(SINGLE).size == 0
  assert metrics.tpot_s(SINGLE) is None
  assert metrics.ttft_s(SINGLE) == metrics.e2e_s(SINGLE) == 0.125


def test_summary_counts_completed_requests_only():
  summary = metrics.summarize(ALL)
  assert summary["completed"] == 3
  assert summary["duration"] == 4.0  # to the last token of anyone
  assert summary["total_input_tokens"] == 25
  assert summary["total_output_tokens"] == 8
  assert summary["output_throughput"] == 2.0
  assert summary["request_throughput"] == 0.75
  assert summary["total_token_throughput"] == 33 / 4


def test_summary_pools_gaps_and_averages_requests():
  summary = metrics.summarize(ALL)
  gaps = 1e3 * np.array([0.1, 0.1, 0.1, 2.0, 0.1])
  assert summary["mean_itl_ms"] == pytest.approx(gaps.mean())
  assert summary["median_itl_ms"] == summary["p50_itl_ms"] == pytest.approx(100)
  assert summary["p99_itl_ms"] == pytest.approx(np.percentile(gaps, 99))
  assert summary["max_itl_ms"] == pytest.approx(2000)
  assert summary["mean_tpot_ms"] == pytest.approx(1e3 * (0.1 + 2.2 / 3) / 2)
  assert summary["max_ttft_ms"] == pytest.approx(500)
  assert summary["p90_e2el_ms"] == pytest.approx(np.percentile([700, 2450, 125], 90))


def test_longest_stall_is_over_all_streams():
  assert metrics.longest_stall(ALL) == metrics.Stall(request_id="aborted", start_s=0.6, end_s=4.0)
  assert metrics.summarize(ALL)["longest_stall_ms"] == pytest.approx(3400)
  stall = metrics.longest_stall([STEADY, STALLED, SINGLE])
  assert (stall.request_id, stall.start_s, stall.seconds) == ("stalled", 0.35, pytest.approx(2.0))


@pytest.mark.parametrize("requests", [[], [SILENT], [request("a", 0.0, 1.0, reason="abort")]])
def test_nothing_finished_is_none_not_zero(requests):
  summary = metrics.summarize(requests)
  assert summary["completed"] == 0 and summary["output_throughput"] == 0.0
  assert summary["p99_itl_ms"] is None and summary["mean_ttft_ms"] is None
  assert summary["longest_stall_ms"] is None
  json.dumps(summary, allow_nan=False)


def test_only_single_tokens_have_ttft_but_no_itl():
  summary = metrics.summarize([SINGLE])
  assert summary["p50_ttft_ms"] == 125 and summary["max_itl_ms"] is None


@pytest.mark.parametrize(
  ("slo", "good"),
  [
    (metrics.Slo(), 3),
    (metrics.Slo(ttft_s=0.25), 2),
    (metrics.Slo(tpot_s=0.2), 2),
    (metrics.Slo(itl_s=1.0), 2),
    (metrics.Slo(e2e_s=0.5), 1),
    (metrics.Slo(ttft_s=0.3, tpot_s=0.2), 1),
  ],
)
def test_goodput_needs_every_objective(slo, good):
  assert metrics.goodput(ALL, slo, duration_s=2.0) == good / 2
  assert metrics.summarize(ALL, slo=slo, duration_s=2.0)["request_goodput"] == good / 2


def test_goodput_of_no_time_is_zero():
  assert metrics.goodput([], metrics.Slo()) == 0.0


STREAMS = st.lists(st.floats(1e-3, 10), min_size=1, max_size=9)


@given(st.lists(STREAMS, min_size=1, max_size=5))
def test_summary_invariants(streams):
  requests = [request(str(i), 0.0, *np.cumsum(gaps).tolist()) for i, gaps in enumerate(streams)]
  summary = metrics.summarize(requests)
  assert summary["total_output_tokens"] == sum(map(len, streams))
  assert summary["p50_ttft_ms"] <= summary["p90_ttft_ms"] <= summary["max_ttft_ms"]
  assert summary["max_itl_ms"] == summary["longest_stall_ms"]
  assert summary["max_e2el_ms"] == pytest.approx(1e3 * summary["duration"])
