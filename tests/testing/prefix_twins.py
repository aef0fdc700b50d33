"""The pure functions with a prefix cache and its plain model, driven together."""

import functools

import jax
import numpy as np

from jaxserve import cache, sched
from tests.testing import prefix_oracle
from tests.testing.scheduling import check_laws, compare_decision, host, to_params

ROOT = cache.root_digest(b"test")


@functools.cache
def compiled(config):
  """(schedule, submit, abort, commit), jitted."""
  return (
    jax.jit(lambda state, params: sched.schedule(state, params, config)),
    jax.jit(sched.submit),
    jax.jit(sched.abort),
    jax.jit(sched.commit),
  )


class PrefixTwins:
  """Submits token ids, commits outputs, compares after every call.

  The output that follows some tokens depends on them alone, so that generated text repeats.
  """

  def __init__(self, config):
    self.config = config
    self.schedule_fn, self.submit_fn, self.abort_fn, self.commit_fn = compiled(config)
    self.state = sched.init(config)
    self.oracle = prefix_oracle.cached(config.policy)(config)
    self.in_flight, self.tokens, self.chains = [], {}, {}

  def submit(self, tokens, max_total, priority=0, await_host=False, reads=True, root=ROOT):
    chain = cache.PageChain(tokens, self.config.cache.page_size, root)
    digests = np.zeros((self.config.pages_per_request, 4), np.uint32)
    digests[: chain.num_pages] = chain.prompt_digests
    self.state, slot = self.submit_fn(
      self.state, np.int32(len(tokens)), np.int32(max_total),
      priority=np.int32(priority), await_host=np.bool_(await_host), digests=digests,
      num_digests=np.int32(chain.num_pages), reads_cache=np.bool_(reads),
    )  # fmt: skip
    expected = self.oracle.submit(
      len(tokens), max_total, priority, await_host, _keys(chain.prompt_digests), reads
    )
    assert int(slot) == (self.config.max_requests if expected is None else expected)
    if expected is not None:
      self.tokens[expected], self.chains[expected] = list(tokens), chain
    self.check()
    return expected

  def abort(self, slot):
    self.state = self.abort_fn(self.state, np.arange(self.config.max_requests) == slot)
    self.oracle.abort(slot)
    self.check()

  def schedule(self, params):
    before = host(self.state)
    self.state, decision = self.schedule_fn(self.state, to_params(self.config, params))
    step = self.oracle.schedule(params)
    decision = host(decision)
    compare_decision(self.config, decision, step)
    check_laws(self.config, params, before, host(self.state), decision)
    cached = {q: int(n) for q, n in enumerate(decision.cached) if n}
    assert cached == step.cached
    assert int(decision.evicted) == step.evicted
    self.check()
    self.in_flight.append((decision, step))
    return decision, step

  def commit(self, stopped=frozenset()):
    decision, step = self.in_flight.pop(0)
    digests = np.zeros((self.config.max_requests, 4), np.uint32)
    for r in step.sampled:
      if r in self.oracle.requests:
        tokens = self.tokens[r.slot]
        tokens.append(sum(tokens) % 2)
        digest = self.chains[r.slot].append(tokens[-1])
        if digest is not None:
          digests[r.slot] = digest
    mask = np.isin(np.arange(self.config.max_requests), list(stopped))
    self.state, finished = self.commit_fn(self.state, decision, mask, digests=digests)
    keys = {q: digests[q].tobytes() for q in range(len(digests)) if digests[q, 0]}
    expected = self.oracle.commit(step, stopped, keys)
    assert sorted(np.flatnonzero(finished)) == sorted(expected)
    self.check()
    return expected

  def check(self):
    state = host(self.state)
    check_pool(state.pool, self.oracle.pool)
    held = np.zeros(self.config.cache.num_pages, int)
    queue = [int(q) for q in state.queue if q < self.config.max_requests]
    assert queue == [r.slot for r in self.oracle._sorted(self.oracle.requests)]
    for r in self.oracle.requests:
      table = state.block_tables[r.slot, : state.num_pages[r.slot]].tolist()
      assert table == r.table
      np.add.at(held, table, 1)
      got = (
        state.num_known[r.slot], state.num_computed[r.slot], state.num_in_flight[r.slot],
        state.num_preemptions[r.slot], state.arrival[r.slot],
      )  # fmt: skip
      assert got == (r.known, r.computed, r.in_flight, r.preemptions, r.arrival), r.slot
    assert (held == state.pool.refs).all()
    assert state.pool.num_free == self.oracle.free


def _keys(digests):
  return [digest.tobytes() for digest in digests]


def check_pool(pool, model: prefix_oracle.Pool):
  """Holders, contents, and the order in which free pages will be handed out."""
  assert pool.refs.tolist() == list(model.refs.values())
  content = {p: d.tobytes() for p, d in enumerate(pool.digests) if d[0]}
  assert content == model.content
  assert pool.empty[: pool.num_empty].tolist() == model.empty
  assert free_cached(pool) == list(model.cached)
  assert pool.num_free == model.num_free
  assert pool.num_evicted == model.evicted


def free_cached(pool):
  """Free pages with content, the next to be evicted first."""
  return [
    int(page)
    for at, page in enumerate(pool.log[: pool.tail])
    if at >= pool.head and pool.cell[page] == at and not pool.refs[page] and pool.digests[page, 0]
  ]


def family_prompt(rng, most):
  """A beginning that others have too, and a tail of its own."""
  family, length = int(rng.integers(0, 3)), int(rng.integers(1, most + 1))
  shared = int(rng.integers(0, length + 1)) if rng.random() < 0.7 else length
  base = [(family + i // 2) % 3 for i in range(shared)]
  return base + rng.integers(0, 2, length - shared).tolist()


def prefix_life(rng, config, params, steps, most_prompt=28, most_outputs=8):
  """A random life in which texts repeat, are continued, and are sent twice at once."""
  twins, told = PrefixTwins(config), []
  for _ in range(steps):
    for _ in range(rng.poisson(0.5)):
      tokens = family_prompt(rng, most_prompt)
      if told and rng.random() < 0.3:
        tokens = list(told[rng.integers(0, len(told))])[:most_prompt]
      priority = int(rng.integers(0, 3)) if config.ordering == "priority" else 0
      total = min(len(tokens) + int(rng.integers(1, most_outputs + 1)), config.max_model_len)
      for _ in range(2 if rng.random() < 0.2 else 1):
        slot = twins.submit(tokens, total, priority, reads=bool(rng.random() < 0.9))
      if slot is not None:
        told = [*told[-9:], twins.tokens[slot]]
    if rng.random() < 0.05:
      twins.abort(int(rng.integers(0, config.max_requests)))
    twins.schedule(params)
    if len(twins.in_flight) > int(rng.integers(0, 2)):
      twins.commit({int(rng.integers(0, 60))})
  return twins
