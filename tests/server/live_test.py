"""The page, what it reads, and the budget that it changes while requests run."""

import json
import re

import pytest

from jaxserve import sched
from tests.testing import servers
from tests.testing.servers import SCHEDULER

LONG = {"prompt": "x" * 60, "max_tokens": 30, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def run():
  with servers.running() as run:
    yield run
  servers.served().engine.set_params(sched.make_params(SCHEDULER))


def watched(run, until):
  """Records of steps as they come, until one satisfies `until`."""
  with run.client.stream("GET", "/live/steps") as reply:
    assert reply.headers["content-type"].startswith("text/event-stream")
    records = []
    for line in reply.iter_lines():
      if line:
        records += json.loads(line.removeprefix("data: "))
        if any(map(until, records)):
          return records


def test_steps_are_told_as_they_were(run):
  run.complete(**LONG, cache_salt="told")  # a salt of its own: all of it is computed
  records = watched(run, lambda record: record["pages"] == 0)
  numbers = [record["step"] for record in records]
  assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
  assert sum(record["prefill"] for record in records) == 60
  assert sum(record["decode"] for record in records) == 29
  for record in records:
    assert record["decode"] + record["prefill"] <= record["budget"] == 16 <= record["bucket"]
    assert record["ms"] > 0 and (record["gap_ms"] > 0) is (record["decode"] > 0)


def test_the_budget_changes_without_a_compile(run):
  settings = run.get("/live/settings").json()
  assert (
    settings["budget"] == settings["max_budget"] == 16
    and settings["min_budget"] == servers.NUM_SEATS
  )
  whole = run.complete(**LONG, cache_salt="before")["choices"]
  changed = run.post("/live/settings", {"budget": 5})
  assert changed.json() == settings | {"budget": 5}
  assert run.complete(**LONG, cache_salt="after")["choices"] == whole
  records = watched(run, lambda record: record["budget"] == 5 and record["pages"] == 0)
  prefills = [r["prefill"] for r in records if r["budget"] == 5 and r["prefill"]]
  assert max(prefills) == 5 and sum(prefills) == 60
  for budget in (3, 17):
    reply = run.post("/live/settings", {"budget": budget})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "budget"
  assert run.metric("retraces") == 0 and run.metric("step_budget_tokens") == 5


def test_the_page_needs_nothing_from_elsewhere(run):
  reply = run.get("/")
  assert reply.headers["content-type"].startswith("text/html")
  assert "default-src 'none'" in reply.headers["content-security-policy"]
  assert not re.search(r"(src|href)=.?(https?:)?//|@import|url\(", reply.text)
  for name in re.findall(r"\$\('([\w-]+)'\)", reply.text):
    assert f'id="{name}"' in reply.text


def test_watchers_do_not_keep_a_server_up(run):
  with run.client.stream("GET", "/live/steps") as reply:
    lines = reply.iter_lines()
    assert next(lines) == "data: []"
    run.stop()
    assert [line for line in lines if line] == []
  run.thread.join(10)
  assert not run.thread.is_alive()


def test_a_key_guards_the_budget():
  with servers.running(api_key="secret") as run:
    assert run.get("/").status_code == 200
    assert run.post("/live/settings", {"budget": 5}).status_code == 401
    assert run.get("/live/steps").status_code == 401
