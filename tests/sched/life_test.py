"""Whole random lives: arrive, schedule, preempt, abort, finish; array state against oracle."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve import sched
from tests.testing import oracle
from tests.testing.scheduling import Twins, small_config

CONFIGS = {
  "fcfs": small_config(),
  "gate": small_config(reserve="gate"),
  "none": small_config(reserve="none"),
  "priority": small_config(ordering="priority"),
  "priority_none": small_config(ordering="priority", reserve="none"),
  "roomy": small_config(num_pages=71),
}


@st.composite
def params_strategy(draw):
  seats = draw(st.integers(1, 5))
  return oracle.Params(
    budget=draw(st.integers(seats, 17)),
    max_num_seqs=seats,
    threshold=draw(st.sampled_from([0, 0, 1, 4, 9])),
    cap_when_alone=draw(st.booleans()),
    chunked=draw(st.sampled_from([True, True, False])),
    watermark_pages=draw(st.sampled_from([0, 0, 2])),
  )


EVENTS = st.lists(
  st.one_of(
    st.tuples(
      st.just("submit"), st.integers(1, 30), st.integers(1, 12), st.integers(0, 3), st.booleans()
    ),
    st.tuples(st.just("step"), st.integers(0, 5)),
    st.tuples(st.just("step"), st.integers(0, 5)),
    st.tuples(st.just("commit"), st.integers(0, 5)),
    st.tuples(st.just("abort"), st.integers(0, 6)),
  ),
  min_size=1,
  max_size=40,
)


def live(config, params, events):
  twins = Twins(config)
  for kind, *args in events:
    if kind == "submit":
      num_prompt, max_tokens, priority, await_host = args
      total = min(num_prompt + max_tokens, config.max_model_len, config.cache.num_slots + 1)
      if num_prompt < total:
        priority = priority if config.ordering == "priority" else 0
        twins.submit(num_prompt, total, priority, await_host)
    elif kind == "step":
      twins.schedule(params)
      if len(twins.in_flight) > 1:
        twins.commit({args[0]} if args[0] < 2 else set())
    elif kind == "commit" and twins.in_flight:
      twins.commit({args[0]} if args[0] < 2 else set())
    elif kind == "abort":
      twins.abort(args[0])
  return twins


def drain(twins, params, most=2000):
  """Everything accepted ends, whatever the state: progress, and no page is lost."""
  policy = sched.POLICIES[twins.config.policy]
  idle = params.policy.get("prefill_decode_interval", 0) + 1
  may_idle = left = idle if "idle_steps" in policy.exceptions else 0
  for _ in range(most):
    while twins.in_flight:
      twins.commit()
    if not twins.oracle.requests:
      break
    decision, _ = twins.schedule(params)
    acts = decision.num_tokens > 0 or decision.preempted.any()
    left = may_idle if acts else left - 1
    assert left >= 0, "no progress"
  assert not twins.oracle.requests
  assert twins.state.pool.num_free == twins.config.cache.num_pages


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(params=params_strategy(), events=EVENTS)
def test_random_life_equals_oracle_and_drains(name, params, events):
  config = CONFIGS[name]
  if not params.chunked:
    params.budget = config.max_budget
    events = [e if e[0] != "submit" else ("submit", min(e[1], 6), 3, *e[3:]) for e in events]
  drain(live(config, params, events), params)


def random_params(rng):
  return oracle.Params(budget=int(rng.integers(5, 18)), max_num_seqs=int(rng.integers(1, 6)))


def random_life(rng, config, params, steps, most_prompt=30, most_outputs=8):
  """A long life with numpy randomness, for volume."""
  twins = Twins(config)
  for _ in range(steps):
    for _ in range(rng.poisson(0.4)):
      num_prompt = int(rng.integers(1, most_prompt))
      priority = int(rng.integers(0, 3)) if config.ordering == "priority" else 0
      outputs = int(rng.integers(1, most_outputs + 1))
      twins.submit(num_prompt, min(num_prompt + outputs, 31), priority)
    if rng.random() < 0.05:
      twins.abort(int(rng.integers(0, 7)))
    twins.schedule(params)
    if len(twins.in_flight) > int(rng.integers(0, 2)):
      twins.commit({int(rng.integers(0, 60))})
  return twins


@pytest.mark.parametrize("name", CONFIGS)
def test_long_random_life(name):
  rng = np.random.default_rng(0)
  params = random_params(rng)
  drain(random_life(rng, CONFIGS[name], params, steps=300), params)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_many_long_random_lives(name):
  rng = np.random.default_rng(1)
  for _ in range(40):
    params = random_params(rng)
    drain(random_life(rng, CONFIGS[name], params, steps=1000), params)
