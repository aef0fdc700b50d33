"""The engine and the simulator, fed the same arrivals in the time of steps, make the same plans."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxserve import sched, sim
from jaxserve.engine import QueueFullError, SamplingParams
from jaxserve.workload import Workload
from tests.testing.engines import SCHEDULER, tiny_engine

pytestmark = pytest.mark.one_leg

POLICIES = ("vllm_v1", "sarathi", "prefill_first", "sglang")
STEP_S = 1.0


def workload(seed, count=24):
  """Arrivals at whole steps: bursts that outgrow slots and pages, then pauses."""
  rng = np.random.default_rng(seed)
  return Workload(
    arrival_s=np.cumsum(rng.choice([0, 0, 1, 3, 60], size=count)).astype(float),
    num_prompt=rng.integers(1, 40, count),
    num_output=rng.integers(1, 20, count),
  )


def engine_plans(engine, load):
  """(plans, end of the last step); every step takes 1 s, and the driver's clock is virtual."""
  pending, names = collections.deque(range(len(load))), {}
  now = end = 0.0
  plans = []
  while pending or not engine.is_idle:
    if engine.is_idle:
      now = max(now, load.arrival_s[pending[0]])
    while pending and load.arrival_s[pending[0]] <= now:
      number = pending[0]
      prompt, options = (
        [1] * load.num_prompt[number],
        SamplingParams(max_tokens=int(load.num_output[number])),
      )
      try:
        names[engine.submit(prompt, options)] = pending[0]
      except QueueFullError:
        break
      pending.popleft()
    events = engine.step()
    if events:
      now = end = max(end, now) + STEP_S
      rows = [(names[s.request_id], s.start, s.tokens, s.new_pages, s.samples)
              for s in events.scheduled]  # fmt: skip
      ids = [tuple(sorted(names[i] for i in x)) for x in (events.admitted, events.preempted)]
      plans.append((rows, *ids))
  return plans, end


@functools.cache
def compiled_step(config, overlap):
  step_time = sim.per_token(0.0, overhead_s=STEP_S)
  server = sim.Server(config=config, step_time=step_time, overlap=overlap)
  return jax.jit(lambda state, requests, params: sim.step(state, requests, params, server))


def simulated_plans(config, params, load, overlap=True):
  """The same from `sim.step`, iteration by iteration."""
  requests = jax.tree.map(jax.numpy.asarray, sim.requests_of(load, config))
  state = sim.init(config, len(load), 24 * 20)
  step = compiled_step(config, overlap)
  plans, lost = [], ()
  while bool(sim.running(state, requests)):
    state, decision = step(state, requests, params)
    d = jax.tree.map(np.asarray, decision)
    preempted = lost + tuple(sorted(d.arrival[d.preempted].tolist()))
    if not d.num_tokens:
      lost = preempted
      continue
    lost = ()
    rows = [(int(d.arrival[q]), int(d.start[q]), int(d.tokens[q]), int(d.new_pages[q]),
             bool(d.samples[q])) for q in d.order[: d.num_scheduled]]  # fmt: skip
    plans.append((rows, tuple(sorted(d.arrival[d.admitted].tolist())), preempted))
  return plans, float(state.now.s) + float(state.now.ns) / 1e9


@pytest.fixture(scope="module")
def engine():
  return tiny_engine(other_policies=POLICIES[1:])  # the same as in engine_test


@pytest.mark.parametrize("policy", POLICIES)
def test_engine_and_simulator_make_the_same_plans(engine, policy):
  config = dataclasses.replace(SCHEDULER, policy=policy)
  preempted = 0
  for seed, budget in ((0, 61), (1, 61 if sched.POLICIES[policy].whole_prompts else 19)):
    args = {"init_new_token_ratio": 0.0, "page_overhead": 0} if policy == "sglang" else {}
    params = sched.make_params(config, budget=budget, policy=args)
    engine.set_policy(policy, params)
    load = workload(seed)
    found, expected = simulated_plans(config, params, load), engine_plans(engine, load)
    for number, (left, right) in enumerate(zip(expected[0], found[0], strict=True)):
      assert left == right, f"step {number}"
    assert found[1] == expected[1]
    preempted += sum(len(plan[2]) for plan in found[0])
  if policy == "vllm_v1":
    result = sim.simulate(load, config, params, sim.per_token(0.0, overhead_s=STEP_S))
    assert result.steps == len(found[0]) and result.token_s.max() == found[1]
  assert preempted


def test_without_overlap(engine):
  del engine
  one = tiny_engine(overlap=False)
  params = sched.make_params(SCHEDULER, budget=19)
  one.set_params(params)
  load = workload(2)
  assert simulated_plans(SCHEDULER, params, load, overlap=False) == engine_plans(one, load)
  assert simulated_plans(SCHEDULER, params, load) != engine_plans(one, load)
