"""Scheduler runs for tests: jitted functions for a config, the laws, and the twin oracle."""

import functools

import jax
import numpy as np

from jaxserve import sched
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.types import Status
from tests.testing import oracle
from tests.testing.policy_oracles import ORACLES


def small_config(**overrides) -> SchedulerConfig:
  """Prime sizes, so that a shape can be traced to its cause."""
  cache = CacheConfig(
    num_pages=overrides.pop("num_pages", 13), page_size=overrides.pop("page_size", 3)
  )
  fields = dict(max_num_seqs=5, max_requests=7, max_budget=17, max_model_len=31)
  return SchedulerConfig(cache=cache, **(fields | overrides))


@functools.cache
def compiled(config: SchedulerConfig):
  """(schedule, submit, abort, commit), jitted."""
  return (
    jax.jit(lambda state, params: sched.schedule(state, params, config)),
    jax.jit(sched.submit),
    jax.jit(sched.abort),
    jax.jit(sched.commit),
  )


class Twins:
  """The pure functions and the oracle, driven together and compared after every call."""

  def __init__(self, config: SchedulerConfig, reachable: bool = True):
    self.config, self.reachable = config, reachable
    self.schedule_fn, self.submit_fn, self.abort_fn, self.commit_fn = compiled(config)
    self.state = sched.init(config)
    self.oracle = ORACLES[config.policy](config)
    self.in_flight = []

  def submit(self, num_prompt, max_total, priority=0, await_host=False):
    self.state, slot = self.submit_fn(
      self.state, np.int32(num_prompt), np.int32(max_total),
      priority=np.int32(priority), await_host=np.bool_(await_host),
    )  # fmt: skip
    expected = self.oracle.submit(num_prompt, max_total, priority, await_host)
    assert int(slot) == (self.config.max_requests if expected is None else expected)
    self.check()
    return expected

  def abort(self, slot):
    mask = np.arange(self.config.max_requests) == slot
    self.state = self.abort_fn(self.state, mask)
    self.oracle.abort(slot)
    self.check()

  def schedule(self, params: oracle.Params):
    before = host(self.state)
    self.state, decision = self.schedule_fn(self.state, to_params(self.config, params))
    step = self.oracle.schedule(params)
    decision = host(decision)
    compare_decision(self.config, decision, step)
    check_laws(self.config, params, before, host(self.state), decision)
    waits = "decode_waits" in sched.POLICIES[self.config.policy].exceptions
    if self.reachable and self.config.ordering == "fcfs" and not waits:
      check_no_decode_waits(before, decision)
    self.check()
    self.in_flight.append((decision, step))
    return decision, step

  def commit(self, stopped: set[int] = frozenset()):
    decision, step = self.in_flight.pop(0)
    mask = np.isin(np.arange(self.config.max_requests), list(stopped))
    self.state, finished = self.commit_fn(self.state, decision, mask)
    expected = self.oracle.commit(step, stopped)
    assert sorted(np.flatnonzero(finished)) == sorted(expected)
    self.check()
    return expected

  def check(self):
    compare_state(self.config, host(self.state), self.oracle)


def host(tree):
  return jax.tree.map(np.asarray, tree)


def to_params(config, p: oracle.Params):
  params = sched.make_params(
    config,
    budget=p.budget,
    max_num_seqs=p.max_num_seqs,
    long_prefill_token_threshold=p.threshold,
    cap_when_alone=p.cap_when_alone,
    chunked_prefill=p.chunked,
    policy=p.policy,
  )
  return params.__class__(**(vars(params) | {"watermark_pages": np.int32(p.watermark_pages)}))


def compare_decision(config, decision, step: oracle.Step):
  slots = range(config.max_requests)
  assert list(decision.order[: decision.num_scheduled]) == step.order
  assert (decision.order[decision.num_scheduled :] == config.max_requests).all()
  assert {s: int(decision.tokens[s]) for s in slots if decision.tokens[s]} == step.tokens
  assert {s: int(decision.start[s]) for s in step.tokens} == step.start
  assert list(np.flatnonzero(decision.admitted)) == sorted(step.admitted)
  assert list(np.flatnonzero(decision.preempted)) == sorted(step.preempted)
  assert list(np.flatnonzero(decision.samples)) == sorted(r.slot for r in step.sampled)


def compare_state(config, state, twin: oracle.Oracle):
  queue = [int(q) for q in state.queue if q < config.max_requests]
  expected = [r.slot for r in twin._sorted(twin.requests)]
  assert queue == expected
  assert (state.queue[len(queue) :] == config.max_requests).all()
  for r in twin.requests:
    got = (
      state.num_known[r.slot], state.num_computed[r.slot], state.num_pages[r.slot],
      state.num_in_flight[r.slot], state.num_preemptions[r.slot],
      state.status[r.slot] == Status.RUNNING, state.arrival[r.slot],
    )  # fmt: skip
    want = (r.known, r.computed, r.pages, r.in_flight, r.preemptions, r.running, r.arrival)
    assert got == want, (r.slot, got, want)
  assert int(np.sum(state.status != Status.FREE)) == len(twin.requests)
  assert state.pool.num_free == twin.free
  check_pages(config, state)


def check_pages(config, state):
  """Every page is free or held by exactly one request."""
  free = list(state.pool.free_pages[: state.pool.num_free])
  held = [
    p for q in range(config.max_requests) for p in state.block_tables[q, : state.num_pages[q]]
  ]
  assert sorted(free + held) == list(range(config.cache.num_pages))


def check_laws(config, params: oracle.Params, before, after, decision):
  """design: the laws that every policy must keep."""
  assert decision.num_tokens == decision.tokens.sum() <= params.budget
  assert (decision.tokens >= 0).all()
  running = after.status == Status.RUNNING
  assert running.sum() <= max(params.max_num_seqs, (before.status == Status.RUNNING).sum())
  assert not (decision.admitted.any() and decision.preempted.any())
  assert (after.status != Status.FREE).sum() == (before.status != Status.FREE).sum()
  covered = after.num_pages * config.cache.page_size
  assert (covered >= after.num_computed)[running].all()


def check_no_decode_waits(before, decision):
  """Under FCFS, in states that the scheduler itself led to."""
  ready = (before.status == Status.RUNNING) & (before.num_known - before.num_computed == 1)
  ready &= before.num_known < before.max_total
  ready &= ~(before.await_host & (before.num_in_flight > 0))
  assert (decision.tokens[ready & ~decision.preempted] == 1).all(), "a decode waited"
