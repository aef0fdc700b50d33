"""Several servers and two pools: against single simulations, and by hand."""

import dataclasses

import numpy as np
import pytest

from jaxserve import sched, sim
from jaxserve.sched.rules import running, serve
from jaxserve.workload import Workload
from tests.testing.scheduling import small_config

STEP_TIME = sim.per_token(2.0**-9, overhead_s=2.0**-6)
CONFIG = small_config(num_pages=71)
LINK = sim.Link(bytes_per_token=1000.0, bytes_per_s=32_000.0, latency_s=0.25)


def fleet(replicas=1, routing="round_robin", config=CONFIG, **params):
  return sim.Fleet(
    config=config, params=sched.make_params(config, **params), step_time=STEP_TIME,
    replicas=replicas, routing=routing,
  )  # fmt: skip


def random_load(seed, count=40):
  rng = np.random.default_rng(seed)
  return Workload(
    arrival_s=np.cumsum(rng.choice([0.0, 2**-6, 0.03, 0.7], size=count)),
    num_prompt=rng.integers(1, 24, count),
    num_output=rng.integers(1, 12, count),
  )


def assert_equal(one, other):
  for field in dataclasses.fields(one):
    left, right = getattr(one, field.name), getattr(other, field.name)
    np.testing.assert_array_equal(left, right, err_msg=field.name)


def alone(load, config=CONFIG, **params):
  return sim.simulate(load, config, sched.make_params(config, **params), STEP_TIME)


def test_round_robin_equals_separate_simulations_of_the_split_workload():
  load = random_load(0)
  served = sim.serve(load, fleet(3))
  np.testing.assert_array_equal(served.replica, np.arange(40) % 3)
  for i, server in enumerate(served.servers):
    assert_equal(server, alone(load.where(np.arange(40) % 3 == i)))
  tokens = sum(int(server.tokens) for server in served.servers)
  assert served.result.tokens == tokens
  np.testing.assert_allclose(
    served.result.busy_s, np.mean([float(server.busy_s) for server in served.servers])
  )


def test_stepping_from_arrival_to_arrival_changes_nothing():
  """Least-loaded routing looks at the servers in between; with one server it cannot choose."""
  for seed in range(3):
    load = random_load(seed)
    assert_equal(sim.serve(load, fleet(1, "least_loaded")).servers[0], alone(load))
    turns = sim.serve(load, fleet(3, lambda number, loads: number % 3))
    assert_equal(turns.result, sim.serve(load, fleet(3)).result)


def test_the_merged_result_has_every_request_at_its_place():
  load = random_load(1)
  served = sim.serve(load, fleet(2, "least_loaded"))
  requests = served.result.requests()
  for i, server in enumerate(served.servers):
    mine = np.flatnonzero(served.replica == i)
    for number, request in zip(mine, server.requests(), strict=True):
      assert request.token_times_s.tolist() == requests[number].token_times_s.tolist()
      assert request.arrival_s == requests[number].arrival_s


def test_least_loaded_sees_what_has_finished():
  """Seconds by hand: 1/64 a step and 1/512 a token; requests end 2 to 6 steps after they begin."""
  seen = []

  def watch(number, loads):
    seen.append(loads.tolist())
    return int(loads.argmin())

  load = Workload(
    arrival_s=[0.0, 0.0, 0.0, 10.0, 10.0], num_prompt=np.full(5, 4), num_output=[3, 3, 3, 3, 3]
  )
  served = sim.serve(load, fleet(2, watch))
  assert seen == [[0, 0], [1, 0], [1, 1], [0, 0], [1, 0]]
  assert served.replica.tolist() == [0, 1, 0, 0, 1]
  assert_equal(sim.serve(load, fleet(2, "least_loaded")).result, served.result)


def test_least_loaded_beats_turns_where_lengths_alternate():
  """Every second request is long: turns give all of them to one server."""
  count = 60
  long = np.arange(count) % 2 == 0
  load = Workload(
    arrival_s=np.arange(count) * 0.03, num_prompt=np.where(long, 20, 2),
    num_output=np.where(long, 11, 1),
  )  # fmt: skip
  turns, loaded = (
    sim.serve(load, fleet(2, routing)).result for routing in ("round_robin", "least_loaded")
  )
  assert loaded.ttft_s.mean() < 0.5 * turns.ttft_s.mean()
  assert loaded.num_output.sum() == turns.num_output.sum()


def test_a_server_without_requests_has_no_result():
  served = sim.serve(random_load(0, 1), fleet(3))
  assert served.servers[1:] == [None, None] and served.replica.tolist() == [0]


def test_two_pools_by_hand():
  """One request, 8 prompt tokens, 3 outputs: prefill, 0.25 s and 8,000 bytes, two decodes."""
  load = Workload(arrival_s=[1.0], num_prompt=[8], num_output=[3])
  split = sim.disaggregate(load, fleet(), fleet(), LINK)
  prefill_s, decode_s = 2**-6 + 8 * 2**-9, 2**-6 + 2**-9
  first = 1.0 + prefill_s
  there = first + 0.25 + 8 * 1000 / 32_000
  expected = [first, there + decode_s, there + 2 * decode_s]
  np.testing.assert_allclose(split.result.token_s, expected, rtol=0, atol=2e-9)
  np.testing.assert_allclose(split.sent_s, [0.5])
  np.testing.assert_allclose(split.result.ttft_s, [prefill_s], atol=2e-9)
  assert (split.result.steps, split.result.tokens) == (3, 10)
  np.testing.assert_allclose(split.result.busy_s, (prefill_s + 2 * decode_s) / 2, atol=1e-8)


def test_transfers_of_one_server_wait_for_each_other():
  load = Workload(arrival_s=[0.0, 0.0], num_prompt=[8, 8], num_output=[2, 2])
  together = sim.disaggregate(load, fleet(), fleet(), LINK)
  np.testing.assert_allclose(sorted(together.sent_s), [0.5, 1.0])  # one step holds both prompts
  apart = sim.disaggregate(load, fleet(2), fleet(), LINK)
  np.testing.assert_allclose(apart.sent_s, [0.5, 0.5])


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_two_pools_conserve_requests_and_tokens(routing):
  load = random_load(4, 60)
  split = sim.disaggregate(load, fleet(2, routing), fleet(3, routing), LINK)
  outputs = np.minimum(load.num_output, 31 - load.num_prompt)
  assert split.result.num_output.tolist() == outputs.tolist()
  assert len(split.decode.replica) == (outputs > 1).sum()
  assert (split.sent_s[outputs == 1] == 0).all()
  # Every prompt once in the prefill fleet, every output but the first once in the decode fleet.
  assert split.prefill.result.tokens == load.num_prompt.sum()
  assert split.decode.result.preemptions == 0
  assert split.decode.result.tokens == (outputs - 1).sum()
  ones = dataclasses.replace(load, num_output=np.ones(60))
  np.testing.assert_array_equal(
    split.result.ttft_s, sim.serve(ones, fleet(2, routing)).result.ttft_s
  )
  for number, request in enumerate(split.result.requests()):
    times = request.token_times_s
    assert (np.diff(times) > 0).all() and len(times) == outputs[number]
    if len(times) > 1:
      assert times[1] - times[0] > split.sent_s[number]


def test_a_preempted_request_is_computed_again_where_it_decodes():
  tight = small_config(num_pages=9, reserve="none")
  load = Workload(arrival_s=np.zeros(4), num_prompt=np.full(4, 5), num_output=np.full(4, 11))
  quick = dataclasses.replace(LINK, latency_s=0.0, bytes_per_s=1e9)
  split = sim.disaggregate(load, fleet(), fleet(config=tight), quick)
  assert split.decode.result.preemptions > 0
  assert split.decode.result.tokens > 4 * 10
  assert all((np.diff(r.token_times_s) > 0).all() for r in split.result.requests())


def test_outputs_of_one_need_no_decode_fleet():
  load = Workload(arrival_s=[0.0], num_prompt=[4], num_output=[1])
  split = sim.disaggregate(load, fleet(), fleet(), LINK)
  assert split.decode is None and split.result.num_output.tolist() == [1]


REFUSED = {
  "replicas=0: must be at least 1": lambda: fleet(0),
  "routing='best'": lambda: fleet(2, "best"),
  "bytes_per_s=0: must be a positive": lambda: sim.Link(bytes_per_token=1, bytes_per_s=0),
  "latency_s=-1": lambda: sim.Link(bytes_per_token=1, bytes_per_s=1, latency_s=-1),
  "request 0: prompt: 40 tokens": lambda: sim.serve(
    Workload(arrival_s=[0.0], num_prompt=[40], num_output=[1]), fleet()
  ),
  "needs two outputs": lambda: sim.serve(random_load(0), fleet(), handed_over=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_mistakes_are_named(message):
  with pytest.raises(ValueError, match=message):
    REFUSED[message]()


def test_a_policy_that_admits_nobody_is_an_error():
  lazy = sched.Policy(rule=sched.chain(serve(running)), formula="", source="this test")
  config = small_config(policy=lazy)
  with pytest.raises(RuntimeError, match="no step can serve"):
    sim.serve(random_load(0, 2), fleet(config=config))
