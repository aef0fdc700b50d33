"""Step by step decisions of vLLM V1, re-told as data in tests/golden/vllm_scenarios.json.

Every scenario runs with `reserve="gate"`, as vLLM admits. `DIFFERENT` lists what jaxserve does
otherwise on purpose; those scenarios must differ, so that the table stays true.
"""

import json
import pathlib

import numpy as np
import pytest

from jaxserve import sched
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.types import Status
from tests.testing.scheduling import compiled, host

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "vllm_scenarios.json"
SCENARIOS = {s["name"]: s for s in json.loads(GOLDEN.read_text())}

# Scenario -> (step of the first difference, why jaxserve differs).
DIFFERENT = {
  "priority_self_victim_ends_running_loop": (
    2,
    "victims are chosen before anyone is served, in priority order, so the urgent request is "
    "served in the step that preempts the other; vLLM's loop ends and the step is empty",
  ),
}
# Refused at submit with the numbers, instead of blocking the queue or looping for ever.
REFUSED = {
  "unservable_prompt_blocks_queue": ["big"],
  "unservable_prompt_without_gate_livelocks": ["big"],
}


def config_of(scenario) -> tuple[SchedulerConfig, dict]:
  c = scenario["config"]
  config = SchedulerConfig(
    cache=CacheConfig(num_pages=c.get("num_pages", 9999), page_size=c.get("page_size", 16)),
    max_num_seqs=16,
    max_requests=16,
    max_budget=8192,
    max_model_len=c.get("max_model_len", 2048),
    ordering=c.get("ordering", "fcfs"),
    reserve=c.get("reserve", "gate"),
  )
  params = sched.make_params(
    config,
    budget=c.get("budget", 8192),
    max_num_seqs=min(c.get("max_num_seqs", 16), c.get("budget", 8192)),
    long_prefill_token_threshold=c.get("threshold", 0),
    chunked_prefill=c.get("chunked", True),
    watermark=c.get("watermark", 0.0),
  )
  return config, params


class Run:
  """A scenario on the pure functions, in synchronous steps: schedule, then commit."""

  def __init__(self, scenario):
    self.config, self.params = config_of(scenario)
    self.schedule_fn, self.submit_fn, self.abort_fn, self.commit_fn = compiled(self.config)
    self.state = sched.init(self.config)
    self.slots: dict[str, int] = {}
    self.refused: list[str] = []

  def submit(self, request):
    prompt, max_tokens = request["prompt"], request["max_tokens"]
    try:
      sched.check_request(self.config, self.params, prompt, max_tokens)
    except ValueError:
      self.refused.append(request["id"])
      return
    limit = sched.request_limit(self.config, prompt, max_tokens)
    self.state, slot = self.submit_fn(
      self.state, np.int32(prompt), np.int32(limit),
      priority=np.int32(request.get("priority", 0)), await_host=np.bool_(False),
    )  # fmt: skip
    self.slots[request["id"]] = int(slot)

  def abort(self, names):
    slots = [self.slots.pop(n) for n in names if n in self.slots]
    self.state = self.abort_fn(self.state, np.isin(np.arange(self.config.max_requests), slots))

  def step(self):
    self.state, decision = self.schedule_fn(self.state, self.params)
    state, decision = host((self.state, decision))
    names = {slot: name for name, slot in self.slots.items()}
    queue = [int(q) for q in state.queue if q < self.config.max_requests]
    seen = {
      "tokens": {names[q]: int(decision.tokens[q]) for q in decision.order if q in names},
      "preempted": sorted(names[q] for q in np.flatnonzero(decision.preempted)),
      "running": [names[q] for q in queue if state.status[q] == Status.RUNNING],
      "waiting": [names[q] for q in queue if state.status[q] == Status.WAITING],
      "free": int(state.pool.num_free),
    }
    none = np.zeros(self.config.max_requests, bool)
    self.state, finished = self.commit_fn(self.state, decision, none)
    seen["finished"] = sorted(names[int(q)] for q in np.flatnonzero(finished))
    for name in seen["finished"]:
      del self.slots[name]
    return seen


def expected_view(step, by_priority):
  view = {"tokens": {}, "preempted": [], "running": [], "waiting": [], "finished": []} | {
    k: v for k, v in step.items() if not k.startswith("abort")
  }
  # Under priority the running list is shown in service order here, in admission order there.
  unordered = ["preempted", "finished"] + (["running", "waiting"] if by_priority else [])
  return view | {k: sorted(view[k]) for k in unordered}


def differences(scenario):
  """(step, seen, expected) of the first step that differs, or None; and the refused requests."""
  run, by_priority = Run(scenario), scenario["config"].get("ordering") == "priority"
  for index, step in enumerate(scenario["steps"]):
    arrivals = [r for r in scenario["requests"] if r["step"] == index]
    for request in sorted(arrivals, key=lambda r: r.get("time", 0)):
      run.submit(request)
    run.abort(step.get("abort_before", []))
    seen, expected = run.step(), expected_view(step, by_priority)
    if by_priority:
      seen |= {k: sorted(seen[k]) for k in ("running", "waiting")}
    # Requests ended from outside after this step count as finished in it.
    run.abort(step.get("abort_after", []))
    seen["finished"] = sorted(seen["finished"] + step.get("abort_after", []))
    if seen != expected:
      return (index, seen, expected), run.refused
  return None, run.refused


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
  difference, refused = differences(SCENARIOS[name])
  if name in REFUSED:
    assert refused, "should be refused at submit"
    return
  assert not refused
  if name in DIFFERENT:
    assert difference is not None and difference[0] == DIFFERENT[name][0]
    return
  assert difference is None, difference


def in_flight_pair(num_pages, budget, prompt):
  """Two requests whose next input must come from the host, so that they never overlap."""
  run = Run({"config": {"num_pages": num_pages, "budget": budget}})

  def submit():
    run.state, _ = run.submit_fn(
      run.state, np.int32(prompt), np.int32(prompt + 16),
      priority=np.int32(0), await_host=np.bool_(True),
    )  # fmt: skip

  def schedule():
    run.state, decision = run.schedule_fn(run.state, run.params)
    tokens = {int(q): int(decision.tokens[q]) for q in np.flatnonzero(decision.tokens)}
    return decision, tokens

  def commit(decision):
    run.state, _ = run.commit_fn(run.state, decision, np.zeros(16, bool))

  return run, submit, schedule, commit


def test_request_in_flight_is_not_scheduled_again_before_its_token_is_known():
  run, submit, schedule, commit = in_flight_pair(num_pages=9999, budget=1024, prompt=512)
  submit()
  first, tokens = schedule()
  assert tokens == {0: 512} and run.state.pool.num_free == 9967
  submit()
  second, tokens = schedule()
  assert tokens == {1: 512} and run.state.pool.num_free == 9935
  commit(first)
  _, tokens = schedule()
  assert tokens == {0: 1} and run.state.pool.num_free == 9934
  commit(second)
  assert int(np.sum(run.state.status == Status.RUNNING)) == 2


def test_preempted_while_in_flight_keeps_its_sample():
  run, submit, schedule, commit = in_flight_pair(num_pages=10, budget=100, prompt=80)
  submit()
  first, tokens = schedule()
  assert tokens == {0: 80} and run.state.pool.num_free == 5
  submit()
  second, tokens = schedule()
  assert tokens == {1: 80} and run.state.pool.num_free == 0
  commit(first)
  third, tokens = schedule()
  assert tokens == {0: 1} and third.preempted[1] and run.state.pool.num_free == 4
  commit(second)
  state = host(run.state)
  assert (state.num_known[1], state.num_computed[1], state.num_in_flight[1]) == (81, 0, 0)
  assert state.status[1] == Status.WAITING


# Configuration and request checks: (fields, accepted?).
CONFIG_CASES = [
  (dict(budget=128, max_num_seqs=256), False),
  (dict(budget=512, max_num_seqs=8, max_model_len=4096, threshold=5000), False),
  (dict(threshold=-1), False),
  (dict(budget=0), False),
  (dict(max_num_seqs=0), False),
  (dict(watermark=-0.1), False),
  (dict(watermark=0.99), True),
  (dict(budget=4096, max_num_seqs=2, max_model_len=1024), True),
]


@pytest.mark.parametrize("fields, accepted", CONFIG_CASES)
def test_config_case(fields, accepted):
  def make():
    c = dict(budget=8192, max_num_seqs=16, max_model_len=2048, threshold=0, watermark=0.0) | fields
    config = SchedulerConfig(
      cache=CacheConfig(num_pages=99, page_size=16),
      max_num_seqs=c["max_num_seqs"],
      max_requests=max(c["max_num_seqs"], 1),
      max_budget=c["budget"],
      max_model_len=c["max_model_len"],
    )
    sched.make_params(config, long_prefill_token_threshold=c["threshold"], watermark=c["watermark"])

  if accepted:
    make()
  else:
    with pytest.raises(ValueError, match=r"=.*: "):
      make()


REQUEST_CASES = [
  (dict(num_prompt=0, max_tokens=1), "empty"),
  (dict(num_prompt=2048, max_tokens=1), "max_model_len=2048"),
  (dict(num_prompt=2047, max_tokens=1), None),
  (dict(num_prompt=2000, max_tokens=None), None),
  (dict(num_prompt=10, max_tokens=0), "max_tokens=0"),
  (dict(num_prompt=10, max_tokens=2, min_tokens=3), "min_tokens=3"),
]


@pytest.mark.parametrize("fields, message", REQUEST_CASES)
def test_request_case(fields, message):
  config = SchedulerConfig(
    cache=CacheConfig(num_pages=9999, page_size=16),
    max_num_seqs=16, max_requests=16, max_budget=8192, max_model_len=2048,
  )  # fmt: skip
  params = sched.make_params(config)
  if message is None:
    sched.check_request(config, params, **fields)
  else:
    with pytest.raises(ValueError, match=message):
      sched.check_request(config, params, **fields)
  if fields["num_prompt"] == 2000:
    assert sched.request_limit(config, 2000, None) - 2000 == 48
