"""Simulations against a plain event loop, and the laws of a queue."""

import dataclasses

import numpy as np
import pytest

from jaxserve import cost, metrics, sched, sim
from jaxserve.sched.rules import running, serve
from jaxserve.workload import Workload
from tests.testing import event_loop, oracle
from tests.testing.scheduling import small_config, to_params

# Powers of two of a second are exact in float32 and in nanoseconds.
OVERHEAD_NS, TOKEN_NS = 15_625_000, 1_953_125
STEP_TIME = sim.per_token(2.0**-9, overhead_s=2.0**-6)


def step_ns(tokens):
  return OVERHEAD_NS + TOKEN_NS * tokens


def random_load(rng, config, count=25, most_prompt=28):
  """Bursts and pauses; more requests at once than slots."""
  gaps = rng.choice([0.0, 2**-6, 0.03, 0.7], size=count)
  by_priority = config.ordering == "priority"
  return Workload(
    arrival_s=np.cumsum(gaps),
    num_prompt=rng.integers(1, most_prompt, count),
    num_output=rng.integers(1, 12, count),
    priority=rng.integers(0, 3 if by_priority else 1, count),
  )


def config_for(policy, **overrides):
  whole = sched.POLICIES[policy].whole_prompts
  return small_config(policy=policy, **({"max_budget": 31 if whole else 17} | overrides))


def check_against_loop(result, load, config, params, overlap):
  expected = event_loop.serve(load, config, params, step_ns, overlap)
  tokens = [t for request in range(len(load)) for t in expected.tokens[request]]
  started = [expected.started[request] for request in range(len(load))]
  assert np.rint(result.token_s * 1e9).astype(int).tolist() == tokens
  assert np.rint(result.started_s * 1e9).astype(int).tolist() == started
  assert (result.steps, result.tokens, result.preemptions) == (
    expected.steps, expected.computed, expected.preemptions,
  )  # fmt: skip
  assert round(float(result.busy_s) * 1e9) == expected.busy
  return expected


SELDOM_PREEMPT = ("orca", "static", "prefill_first", "simple_chunking", "sglang_mixed")
# Keeps nothing free for outputs still to come, so that requests are retracted.
HOPEFUL = {"init_new_token_ratio": 0.0, "page_overhead": 0, "prefill_decode_interval": 2}
CASES = [
  *((policy, True, {}) for policy in sorted(sched.POLICIES)),
  ("vllm_v1", False, {}),
  ("simple_chunking", False, {}),
  ("vllm_v1", True, {"ordering": "priority", "reserve": "none"}),
]


@pytest.mark.parametrize(("policy", "overlap", "overrides"), CASES)
def test_times_and_counts_equal_a_plain_event_loop(policy, overlap, overrides):
  rng, config = np.random.default_rng(7), config_for(policy, **overrides)
  preemptions = 0
  for _ in range(6):
    seats = int(rng.integers(1, 6))
    budget = int(rng.integers(5, 18))
    params = oracle.Params(
      budget=config.max_budget if config.max_budget == 31 else budget, max_num_seqs=seats,
      threshold=int(rng.choice([0, 4])) if policy == "vllm_v1" else 0,
      policy=HOPEFUL if policy.startswith("sglang") else {},
    )  # fmt: skip
    load = random_load(rng, config)
    result = sim.simulate(load, config, to_params(config, params), STEP_TIME, overlap=overlap)
    preemptions += check_against_loop(result, load, config, params, overlap).preemptions
  assert preemptions or policy in SELDOM_PREEMPT


def test_lanes_equal_single_runs_bit_by_bit():
  rng = np.random.default_rng(3)
  config = small_config(reserve="none")
  step_time = sim.roofline(cost.LLAMA3_8B, cost.H100, overhead_s=1e-3)
  batch, settings = sim.grid(config, budget=[5, 11, 17], long_prefill_token_threshold=[0, 4])
  loads = [random_load(rng, config) for _ in range(2)]
  buckets = (4, 8, 17)
  many = sim.sweep(loads, config, batch, step_time, buckets=buckets)
  assert many.lanes == (2, 6) and len(settings) == 6
  for i, load in enumerate(loads):
    for j, setting in enumerate(settings):
      params = sched.make_params(config, **setting)
      one, lane = sim.simulate(load, config, params, step_time, buckets=buckets), many.lane(i, j)
      assert one.lanes == ()
      for field in dataclasses.fields(one):
        left, right = getattr(one, field.name), getattr(lane, field.name)
        np.testing.assert_array_equal(left, right[: len(left)] if left.ndim else right)
  assert many.preemptions.sum() > 0 and len(set(many.steps.ravel().tolist())) > 3


@pytest.fixture(scope="module")
def busy():
  """(workload, result) of a few hundred requests of the default policy, in buckets."""
  rng = np.random.default_rng(0)
  config = small_config(num_pages=71)
  load = random_load(rng, config, count=300)
  calls = []
  params = sched.make_params(config)
  step_time = sim.roofline(cost.LLAMA3_8B, cost.H100)
  run = lambda: sim.simulate(
    load, config, params, step_time, buckets=(4, 8, 17), on_progress=calls.append
  )
  return load, run(), run(), calls


def test_every_request_finishes_with_all_its_tokens(busy):
  load, result, _, calls = busy
  assert calls[-1] == 300
  requests = result.requests()
  expected = np.minimum(load.num_output, 31 - load.num_prompt)
  assert [r.num_output for r in requests] == expected.tolist()
  for r in requests:
    assert r.arrival_s <= result.started_s[int(r.request_id)] < r.token_times_s[0]
    assert (np.diff(r.token_times_s) > 0).all()
  assert result.tokens >= load.num_prompt.sum() + (expected - 1).sum()


def test_a_simulation_is_deterministic(busy):
  _, first, second, _ = busy
  for field in dataclasses.fields(first):
    np.testing.assert_array_equal(getattr(first, field.name), getattr(second, field.name))


def test_littles_law(busy):
  """The time that requests spend in the system, as a sum over requests and over time."""
  _, result, _, _ = busy
  ends = result.arrival_s + result.e2e_s
  times = np.sort(np.concatenate([result.arrival_s, ends]))
  inside = np.searchsorted(np.sort(result.arrival_s), times, "right") - np.searchsorted(
    np.sort(ends), times, "right"
  )
  assert inside[-1] == 0
  area = (inside[:-1] * np.diff(times)).sum()
  np.testing.assert_allclose(area, result.e2e_s.sum())


def test_steps_do_not_overlap_on_the_device(busy):
  _, result, _, _ = busy
  ends = np.unique(result.token_s)
  assert 0 < result.busy_s <= ends[-1] - result.arrival_s[0] + 1e-9
  assert len(ends) <= result.steps and result.padding > 0


def test_summary_agrees_with_the_arrays(busy):
  _, result, _, _ = busy
  summary = result.summary(metrics.Slo(ttft_s=0.1, itl_s=0.05))
  ms = 1e3
  np.testing.assert_allclose(summary["p99_ttft_ms"], ms * np.percentile(result.ttft_s, 99))
  np.testing.assert_allclose(summary["p99_itl_ms"], ms * np.percentile(result.itl_s(), 99))
  np.testing.assert_allclose(summary["mean_e2el_ms"], ms * result.e2e_s.mean())
  np.testing.assert_allclose(summary["mean_tpot_ms"], ms * np.nanmean(result.tpot_s))
  np.testing.assert_allclose(
    summary["max_scheduling_delay_ms"], ms * result.scheduling_delay_s.max()
  )
  assert 0 < summary["utilization"] <= 1 and 0 < summary["padding_share"] < 1
  assert 0 < summary["request_goodput"] <= summary["request_throughput"]
  with pytest.raises(ValueError, match=r"lanes=\(1,\)"):
    dataclasses.replace(result, steps=np.zeros(1)).requests()


def test_requests_beyond_the_slots_are_held_back_in_order(busy):
  """All at once: they start in order, and their time runs from the arrival."""
  config = small_config(num_pages=71)
  load = Workload(
    arrival_s=np.zeros(25), num_prompt=np.full(25, 9), num_output=np.full(25, 4)
  )  # fmt: skip
  result = sim.simulate(load, config, sched.make_params(config), STEP_TIME)
  assert (np.diff(result.started_s) >= 0).all() and result.started_s[-1] > 0
  np.testing.assert_array_equal(result.ttft_s, result.token_s[::4])


LOAD = Workload(arrival_s=[0.0, 1.0], num_prompt=[4, 5], num_output=[2, 2])
REFUSED = {
  "request 1: prompt: 40 tokens": dict(load=dataclasses.replace(LOAD, num_prompt=[4, 40])),
  "request 0: prompt: 20 tokens exceed budget=17": dict(
    load=dataclasses.replace(LOAD, num_prompt=[20, 5]), chunked_prefill=False
  ),
  "has no request": dict(load=LOAD.first(0)),
  "orders by arrival": dict(load=dataclasses.replace(LOAD, priority=[0, 1])),
  "the last must be max_budget=17": dict(load=LOAD, buckets=(4, 8)),
  "max_budget=50000: sums of a step overflow": dict(load=LOAD, max_budget=50000),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_can_never_be_served_is_refused(message):
  case = dict(REFUSED[message])
  load, buckets = case.pop("load"), case.pop("buckets", ())
  config = small_config(max_budget=case.pop("max_budget", 17))
  with pytest.raises(ValueError, match=message.replace("(", r"\(")):
    sim.simulate(load, config, sched.make_params(config, **case), STEP_TIME, buckets=buckets)


def test_a_policy_that_admits_nobody_is_an_error_and_not_an_endless_loop():
  lazy = sched.Policy(rule=sched.chain(serve(running)), formula="", source="this test")
  config = small_config(policy=lazy)
  with pytest.raises(RuntimeError, match="no step can serve"):
    sim.simulate(LOAD, config, sched.make_params(config), STEP_TIME)


def test_workloads_of_a_sweep_must_be_of_one_length():
  config = small_config()
  batch, _ = sim.grid(config, budget=[17])
  with pytest.raises(ValueError, match=r"lengths \[1, 2\]"):
    sim.sweep([LOAD, LOAD.first(1)], config, batch, STEP_TIME)


def test_capacity_is_where_the_objective_breaks():
  """One token a request, 0.1 s each, one at a time: ten a second is all there is."""
  config = small_config(num_pages=71)
  load = Workload(
    arrival_s=np.arange(1, 61) / 1.0, num_prompt=np.full(60, 3), num_output=np.ones(60, np.int32)
  )
  params = sched.make_params(config, max_num_seqs=1)
  step_time = sim.per_token(0.0, overhead_s=0.1)
  slo = metrics.Slo(ttft_s=0.21)
  found = sim.capacity(load, config, params, step_time, slo=slo, share=1.0, tolerance=0.01)
  assert 9 < found.rate < 11 and sim.attainment(found.result, slo) == 1.0
  np.testing.assert_allclose(found.factor, found.rate / load.rate)
  hopeless = sim.capacity(load, config, params, step_time, slo=metrics.Slo(ttft_s=0.05))
  assert hopeless.rate == 0 and hopeless.result is None
