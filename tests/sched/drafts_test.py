"""Draft tokens in the scheduler: random states and lives against the oracle, and single cases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve import sched
from jaxserve.config import PlanShape, SchedulerConfig, SplitKV
from jaxserve.sched import packing
from tests.sched.random_state_test import random_params, random_requests, state_of
from tests.testing import oracle
from tests.testing.draft_oracle import DraftTwins, Request
from tests.testing.scheduling import compiled, host, small_config

K = 3
CONFIGS = {
  "fcfs": small_config(max_num_seqs=6, max_drafts=K),
  "priority": small_config(max_num_seqs=6, max_drafts=K, ordering="priority", reserve="none"),
}


def compare_one_step(rng, config):
  twins = DraftTwins(config, reachable=False)
  requests = [
    Request(**vars(r), drafts=int(rng.integers(0, K + 1))) for r in random_requests(rng, config)
  ]
  for r in requests:  # most of what runs decodes
    r.in_flight *= int(rng.random() < 0.5)
    if r.running and rng.random() < 0.5:
      r.computed = min(r.known, max(r.pages * config.cache.page_size, 1)) - 1
      r.known, r.max_total = r.computed + 1, max(r.max_total, r.computed + 1)
  twins.oracle.requests, twins.oracle.submitted = requests, len(requests)
  twins.oracle.free = config.cache.num_pages - sum(r.pages for r in requests)
  state = state_of(config, requests, twins.oracle._sorted(requests), rng)
  drafts = np.zeros(config.max_requests, np.int32)
  drafts[[r.slot for r in requests]] = [r.drafts for r in requests]
  twins.state = dataclasses.replace(state, num_drafts=jnp.asarray(drafts))
  twins.check()
  decision, _ = twins.schedule(random_params(rng))
  size = config.max_requests
  twins.commit(
    set(rng.integers(0, 3 * size, 1).tolist()), 1 + rng.integers(0, 1 + decision.drafts),
    rng.integers(0, K + 1, size),
  )  # fmt: skip
  return decision


@pytest.mark.parametrize("name", CONFIGS)
def test_one_step_from_random_states(name):
  rng, preempting, verifying = np.random.default_rng(7), 0, 0
  for _ in range(150):
    decision = compare_one_step(rng, CONFIGS[name])
    preempting += bool(decision.preempted.any())
    verifying += bool(decision.drafts.any())
  assert preempting > 3 and verifying > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_one_step_from_very_many_random_states(name):
  rng = np.random.default_rng(8)
  for _ in range(40_000):
    compare_one_step(rng, CONFIGS[name])


EVENTS = st.lists(
  st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 12), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(0, 5), st.integers(0, 2**16)),
    st.tuples(st.just("step"), st.integers(0, 5), st.integers(0, 2**16)),
    st.tuples(st.just("commit"), st.integers(0, 5), st.integers(0, 2**16)),
    st.tuples(st.just("abort"), st.integers(0, 6)),
  ),
  min_size=1,
  max_size=40,
)


def commit(twins, number, seed=0):
  """Some drafts are right, some requests stop, some have new drafts."""
  rng, size = np.random.default_rng(seed), twins.config.max_requests
  drafts = twins.in_flight[0][0].drafts
  stopped = {number} if number < 2 else set()
  twins.commit(stopped, 1 + rng.integers(0, 1 + drafts), rng.integers(0, K + 1, size))


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
  events=EVENTS, seats=st.integers(1, 5), budget=st.integers(5, 17), threshold=st.integers(0, 3)
)
def test_random_life_equals_oracle_and_drains(name, events, seats, budget, threshold):
  twins = DraftTwins(CONFIGS[name])
  params = oracle.Params(budget=budget, max_num_seqs=seats, threshold=threshold)
  for event in events:
    happen(twins, params, *event)
  drain(twins, params)


def happen(twins, params, kind, *args):
  if kind == "submit":
    total = min(args[0] + args[1], twins.config.max_model_len)
    if args[0] < total:
      twins.submit(args[0], total, args[2] if twins.config.ordering == "priority" else 0)
  elif kind == "step":
    twins.schedule(params)
  elif kind == "abort":
    twins.abort(args[0])
  if len(twins.in_flight) > 1 or (kind == "commit" and twins.in_flight):
    commit(twins, *args)


def drain(twins, params, most=2000):
  for seed in range(most):
    while twins.in_flight:
      commit(twins, 9, seed)
    if not twins.oracle.requests:
      break
    decision, _ = twins.schedule(params)
    assert decision.num_tokens > 0 or decision.preempted.any(), "no progress"
  assert not twins.oracle.requests
  assert twins.state.pool.num_free == twins.config.cache.num_pages


TIGHT = dict(num_pages=4, reserve="none")


class Run:
  """The functions by hand: requests are slots in order of arrival."""

  def __init__(self, params=None, **config):
    sizes = dict(num_pages=40, max_model_len=100, max_budget=50)
    self.config = small_config(max_drafts=4, **(sizes | config))
    self.schedule_fn, self.submit_fn, _, self.commit_fn = compiled(self.config)
    self.state = sched.init(self.config)
    self.params = sched.make_params(self.config, **(params or {}))

  def submit(self, num_prompt, max_total=31):
    self.state, slot = self.submit_fn(self.state, np.int32(num_prompt), np.int32(max_total))
    return int(slot)

  def step(self, outputs=(), proposed=(), stopped=()):
    """{slot: (tokens, drafts)} of a step that is then committed."""
    decision = self.schedule()
    self.commit(decision, outputs, proposed, stopped)
    slots = [int(q) for q in decision.order[: decision.num_scheduled]]
    return {q: (int(decision.tokens[q]), int(decision.drafts[q])) for q in slots}

  def schedule(self):
    self.state, decision = self.schedule_fn(self.state, self.params)
    return host(decision)

  def commit(self, decision, outputs=(), proposed=(), stopped=()):
    size = self.config.max_requests
    given, new = np.ones(size, np.int32), np.zeros(size, np.int32)
    given[: len(outputs)], new[: len(proposed)] = outputs, proposed
    mask = np.isin(np.arange(size), stopped)
    self.state, finished = self.commit_fn(self.state, decision, mask, outputs=given, proposed=new)
    return np.flatnonzero(finished).tolist()

  def numbers(self, slot):
    state = self.state
    fields = state.num_known, state.num_computed, state.num_in_flight, state.num_drafts
    return tuple(int(field[slot]) for field in fields)


def test_accepted_drafts_are_known_and_rejected_ones_are_taken_back():
  """vLLM, test_schedule_spec_decoding_stats: [1, 2, 3] drafted, [1, 5] sampled."""
  run = Run()
  run.submit(1)
  assert run.step(proposed=[3]) == {0: (1, 0)}
  assert run.numbers(0) == (2, 1, 0, 3)
  assert run.step(outputs=[2]) == {0: (4, 3)}
  assert run.numbers(0) == (4, 3, 0, 0)


def test_a_request_in_the_middle_of_its_prompt_has_no_drafts():
  """vLLM, test_no_spec_tokens_scheduled_for_prefill_chunks: 50, 30, then 1 + 3."""
  run = Run()
  run.submit(80, 96)
  assert [run.step(proposed=[3]) for _ in range(3)] == [{0: (50, 0)}, {0: (30, 0)}, {0: (4, 3)}]


def test_drafts_never_take_a_decode_its_token():
  """vLLM gives 5 + 5 of a budget of 10 to the first two, and a third decode waits for ever."""
  run = Run(params=dict(budget=10))
  for prompt in (4, 4, 2):
    run.submit(prompt)
  run.step(proposed=[4, 4, 4])
  assert run.step(proposed=[4, 4, 4]) == {0: (5, 4), 1: (4, 3), 2: (1, 0)}


def test_a_prompt_takes_what_drafts_leave():
  run = Run(params=dict(budget=10))
  run.submit(4)
  run.step(proposed=[4])
  run.submit(20)
  assert run.step(proposed=[4]) == {0: (5, 4), 1: (5, 0)}


def test_a_request_with_unverified_drafts_sits_out_the_overlapped_step():
  run = Run()
  run.submit(3), run.submit(3)
  run.step(proposed=[2, 0])
  verifying, ahead = run.schedule(), run.schedule()
  assert verifying.tokens[:2].tolist() == [3, 1] and ahead.tokens[:2].tolist() == [0, 1]
  run.commit(verifying, outputs=[3])
  assert run.numbers(0) == (7, 6, 0, 0)


def test_drafts_for_a_request_that_is_ahead_wait_for_the_newest_output():
  run = Run()
  run.submit(3)
  first, second = run.schedule(), run.schedule()
  run.commit(first, proposed=[2])
  assert run.schedule().num_tokens == 0  # its next output is on its way
  run.commit(second, proposed=[3])
  assert run.step()[0] == (4, 3)


def test_drafts_end_where_the_request_ends():
  """Of two outputs to come one is the model's own, so one draft is verified."""
  run = Run()
  run.submit(3, 6)
  run.step(proposed=[4])
  decision = run.schedule()
  assert (decision.tokens[0], decision.drafts[0]) == (2, 1)
  assert run.commit(decision, outputs=[2]) == [0]


def test_nobody_is_preempted_for_a_draft():
  """Two pages of three tokens each: the second page has room for one draft, a third is not free."""
  run = Run(**TIGHT)
  run.submit(4, 12), run.submit(4, 12)
  run.step(proposed=[4, 4])
  decision = run.schedule()
  assert not decision.preempted.any() and decision.drafts[:2].tolist() == [1, 1]


def test_a_request_preempted_while_its_drafts_are_verified_keeps_the_accepted_ones():
  run = Run(**TIGHT)
  run.submit(5, 12), run.submit(3, 12)
  first = run.schedule()
  run.commit(first, proposed=[0, 2])
  verifying = run.schedule()
  assert verifying.drafts[:2].tolist() == [0, 2]
  ahead = run.schedule()  # the first one needs a third page
  assert ahead.preempted[:2].tolist() == [False, True] and ahead.tokens[0] == 1
  assert run.schedule().tokens[1] == 0  # nobody knows yet how long it is
  run.commit(verifying, outputs=[1, 2], proposed=[0, 4])
  assert run.numbers(1) == (6, 0, 0, 0)


def test_every_draft_is_a_decode_of_attention_and_its_row_goes_to_the_head_with_it():
  run = Run()
  run.submit(4), run.submit(2)
  run.step(proposed=[2])
  run.submit(9)
  decision, shape = run.schedule(), PlanShape.of(run.config, 17, 8)
  plan = host(jax.jit(sched.lay_out, static_argnums=2)(run.state, decision, shape))
  assert plan.num_drafts[:3].tolist() == [2, 0, 0] and plan.num_work.tolist() == [4, 6]
  assert plan.work[:6, :4].tolist() == [
    [0, 0, 1, 4], [0, 1, 1, 5], [0, 2, 1, 6], [1, 3, 1, 2], [2, 4, 8, 0], [2, 12, 1, 8],
  ]  # fmt: skip
  assert plan.work[:4, 4:].tolist() == [[0, p, 0, 1] for p in (5, 6, 7, 3)]
  # On an accelerator the keys of each of these queries may be split.
  shape = PlanShape.of(run.config, 17, 8, SplitKV(capacity=6, tile=2, min_keys=2))
  split = host(jax.jit(sched.lay_out, static_argnums=2)(run.state, decision, shape))
  items = split.work[: split.num_work[0]].tolist()
  assert split.num_work.tolist() == [len(items), len(items) + 2] and len(items) > 4
  for row, query, position in ((0, 0, 4), (0, 1, 5), (0, 2, 6), (1, 3, 2)):
    mine = [item for item in items if item[1] == query]
    assert all(item[:4] == [row, query, 1, position] for item in mine)
    assert [item[6:] for item in mine] == [[i, len(mine)] for i in range(len(mine))]
    edges = [item[4:6] for item in mine]
    assert edges[0][0] == 0 and edges[-1][1] == position + 1
    assert all(a[1] == b[0] for a, b in zip(edges, edges[1:], strict=False))


def test_without_speculation_nothing_is_added_to_state_decision_or_plan():
  config = small_config()
  state = sched.init(config)
  decision, shape = packing.decision_like(config), PlanShape.of(config, 17)
  plan = jax.eval_shape(lambda s, d: sched.lay_out(s, d, shape), state, decision)
  assert state.num_drafts is None and decision.drafts is None and plan.num_drafts is None


def test_a_policy_without_a_rule_for_drafts_is_refused():
  with pytest.raises(ValueError, match=r"policy='sglang'.*max_drafts=4.*vllm_v1"):
    sched.make_params(small_config(max_drafts=4, policy="sglang"))
  with pytest.raises(ValueError, match="max_drafts=-1"):
    SchedulerConfig(**(vars(small_config()) | {"max_drafts": -1}))


def test_bucket_shaped_never_cuts_drafts():
  run = Run(policy="bucket_shaped")
  run.submit(4)
  run.step(proposed=[4])
  run.submit(15)
  assert run.step() == {0: (5, 4), 1: (11, 0)}
