"""What HTTP costs: both ways of serving a load are watched alike."""

import numpy as np
import pytest

from experiments.http_cost import run
from jaxserve import sched
from tests.testing import servers

pytestmark = pytest.mark.one_leg


def test_a_round_on_a_tiny_engine():
  model = servers.served()
  model.engine.guard.count = 0
  config = run.Config(rounds=2, repeats=2, streams=4, tokens=40, idle=5, few=3, long=12, budget=8)
  try:
    found = run.execute(config, model)
  finally:
    model.engine.set_params(sched.make_params(servers.SCHEDULER))
  assert len(found["measured"]) == 2
  for row in found["measured"]:
    assert len(row["http_idle_ms"]) == 2 and np.min(np.hstack(list(row.values()))) > 0
  assert found["idle_ratio"] > 0.2 and found["overhead_ms"] > -found["engine_ms"]
  assert found["gain_kept"] > 0 and model.engine.listener is None
  assert model.engine.is_idle and model.engine.num_free_pages == servers.NUM_PAGES


def test_periods_and_stalls_are_of_the_right_steps():
  watch = run.Watch()
  watch.steps = [
    (0.0, 1, True), (1.0, 2, True), (2.0, 2, False), (3.0, 2, False), (3.5, 0, True),
    (9.0, 3, True), (10.0, 2, False),
  ]  # fmt: skip
  np.testing.assert_allclose(watch.periods(2), [1000.0, 7000.0])
  assert watch.stall() == pytest.approx(6000.0)
