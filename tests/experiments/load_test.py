"""The load tool against a server: what it sends, counts and says."""

import json
import subprocess
import sys

import numpy as np
import pytest

from experiments.load import plot, run
from jaxserve import metrics, workload
from tests.testing import servers


@pytest.fixture(scope="module")
def server():
  with servers.running() as running:
    yield running
    servers.eventually(running.is_empty)


def load_of(prompts, outputs, gap_s=0.01):
  count = len(prompts)
  return workload.Workload(
    arrival_s=gap_s * np.arange(count), num_prompt=np.array(prompts), num_output=np.array(outputs)
  )


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_request_is_counted_with_its_tokens(server, endpoint):
  slo = metrics.Slo(ttft_s=30.0, itl_s=1e-9)
  config = run.Config(url=server.url, endpoint=endpoint, warm_up=2, slo=slo)
  load = load_of([5, 9, 20, 3, 8, 4], [3, 4, 5, 1, 6, 2])
  sent = run.execute(config, load)
  assert [len(one.token_times_s) for one in sent] == [3, 4, 5, 1, 6, 2]
  if endpoint == "completions":
    assert [one.num_prompt for one in sent] == [5, 9, 20, 3, 8, 4]
  assert all(one.status == 200 and one.finish_reason == "length" for one in sent)
  found = run.summary(config, load, sent)
  assert found["completed"] == found["num_prompts"] == 4 and found["failed"] == 0
  assert found["total_output_tokens"] == 14 and found["warm_up"] == 2
  assert 0 < found["mean_ttft_ms"] <= found["p99_ttft_ms"] <= found["mean_e2el_ms"] * 4
  assert found["good_share"] == 0.25  # of one token: it has no gap
  assert found["client_lag_max_ms"] >= found["client_lag_p50_ms"] >= 0
  page = plot.page(config, found, sent)
  assert len(page.rows) == 4 and len(page.charts) == 2


def test_what_fails_is_told_and_does_not_count(server):
  config = run.Config(url=server.url)
  load = load_of([5, 500, 6], [2, 2, 2])
  found = run.summary(config, load, run.execute(config, load))
  assert found["completed"] == 2 and found["failed"] == 1
  assert found["errors"][0].startswith("400: ") and "500 tokens" in found["errors"][0]


def test_bursts_have_the_rate_that_was_asked_for():
  rng = np.random.default_rng(0)
  for burstiness in (0.25, 1.0, 4.0):
    gaps = np.diff(run.arrivals(rng, 20_000, 5.0, burstiness))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** -2 == pytest.approx(burstiness, rel=0.1)
  assert not run.arrivals(rng, 3, float("inf"), 1.0).any()


def call(*arguments):
  command = [sys.executable, "-m", "experiments.load", *map(str, arguments)]
  return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_command(server, tmp_path):
  done = call(
    "--url", server.url, "--rate=inf", "--requests=3", "--warm_up=1", "--lengths=4:9,2",
    "--slo=ttft=20", "--out", tmp_path,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert result["completed"] == 3 and result["request_goodput"] > 0
  kept = json.loads((tmp_path / "result.json").read_text())
  assert len(kept["requests"]) == 4 and kept["p50_itl_ms"] is not None
  assert "time to first token" in done.stdout and (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
  "arguments, message",
  [(["--slo=fast=1"], "slo=fast=1"), (["--lengths=9"], "lengths=9"), (["--url=x"], "url='x'"),
   (["--url=http://127.0.0.1:1"], "Connect")],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments, message):
  done = call(*arguments)
  assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
