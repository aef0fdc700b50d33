"""A short soak: clients that leave, cut, send rubbish, read slowly; nothing may be left of them."""

import time

import pytest

from experiments.soak import run
from tests.testing import servers

pytestmark = pytest.mark.one_leg


def test_twelve_seconds_leave_nothing_behind():
  model = servers.served()
  model.engine.guard.count = 0
  found = run.execute(run.Config(seconds=12, clients=16), model)
  assert found["failures"] == [] and found["wrong"] == [], found
  assert found["free_pages"] == servers.NUM_PAGES and found["retraces"] == 0
  assert found["answered"] > 20 and found["ended"]["abort"] > 5
  assert set(found["done"]) == {
    "complete", "stream", "leave", "slow", "malformed", "oversize", "other", "cut"
  }  # fmt: skip
  assert not model.engine.num_requests


def test_a_fault_is_a_failure(monkeypatch):
  """A client that is answered wrongly, and a page that is lost, are both told."""
  model = servers.served()
  model.engine.guard.count = 0

  async def complain(client):
    time.sleep(0.01)
    client.check(client.rng.random() < 0.5, "wrong answer")

  for name in ("complete", "stream", "leave", "slow", "malformed", "oversize", "other", "cut"):
    monkeypatch.setattr(run.Client, name, complain)
  free = type(model.engine).num_free_pages
  found = run.execute(run.Config(seconds=1, clients=2), model)
  assert found["num_wrong"] > 0 and "not answered" in found["failures"][0]
  assert free is type(model.engine).num_free_pages
