"""The sequential scheduler with draft tokens, and its twin."""

import dataclasses

import numpy as np

from jaxserve.types import Status
from tests.testing import oracle, scheduling


@dataclasses.dataclass
class Request(oracle.Request):
  drafts: int = 0


@dataclasses.dataclass
class Step(oracle.Step):
  drafts: dict[int, int] = dataclasses.field(default_factory=dict)


class DraftOracle(oracle.Oracle):
  """One token for every decode, then drafts, then chunks; nobody is preempted for a draft."""

  def submit(self, *args, **kwargs):
    slot = super().submit(*args, **kwargs)
    if slot is not None:
      self.requests[-1] = Request(**vars(self.requests[-1]))
    return slot

  def schedule(self, params):
    step, served = Step([], {}, {}, [], [], []), []
    left = self._serve_running(params, step, served)
    if not step.preempted:
      self._admit(params, step, served, left)
    for r in served:
      r.computed += step.tokens[r.slot]
      if r.computed - step.drafts.get(r.slot, 0) == r.known:
        r.known += 1
        r.in_flight += 1
        step.sampled.append(r)
    step.order = [r.slot for r in served]
    return step

  def commit(self, step, stopped, outputs, proposed):
    finished = []
    for r in step.sampled:
      if r not in self.requests:
        continue
      r.in_flight -= 1
      drafts = step.drafts.get(r.slot, 0)
      accepted = min(outputs[r.slot] - 1, drafts)
      r.known += accepted
      if r.running:
        r.computed -= drafts - accepted
      r.drafts = proposed[r.slot] if r.running and r.known - r.computed == 1 else 0
      if r.slot in stopped or r.known - r.in_flight >= r.max_total:
        self._end(r)
        finished.append(r.slot)
    return finished

  def _idle(self, r):
    return super()._idle(r) or (r.drafts > 0 and r.in_flight > 0)

  def _asks_to_verify(self, r, params):
    if self._idle(r) or r.known - r.computed != 1:
      return 0
    wanted = min(r.drafts, r.max_total - r.known - 1)
    if params.threshold and (params.cap_when_alone or len(self.requests) > 1):
      wanted = min(wanted, params.threshold - 1)
    return max(wanted, 0)

  def _serve_running(self, params, step, served):
    running, left, grants, extra = self.running(), params.budget, {}, {}
    decodes = [r for r in running if r.known - r.computed == 1]
    if self.config.ordering == "fcfs":
      before, after = decodes, [r for r in running if r not in decodes]
    else:
      before, after = running, []
    for r in before:
      grants[r.slot] = min(self._ask(r, params), left)
      left -= grants[r.slot]
    for r in decodes:
      extra[r.slot] = min(self._asks_to_verify(r, params), left) if grants[r.slot] else 0
      left -= extra[r.slot]
    for r in after:
      grants[r.slot] = min(self._ask(r, params), left)
      left -= grants[r.slot]
    self._fit(running, grants, step, served)
    return left + self._verify(extra, step, served)

  def _fit(self, running, grants, step, served):
    i = 0
    while i < len(running):
      r = running[i]
      i += 1
      if not grants[r.slot]:
        continue
      demand = max(self._pages_for(r.computed + grants[r.slot]) - r.pages, 0)
      while demand > self.free and r in running:
        victim = running.pop()
        self.free += victim.pages
        victim.pages = victim.computed = 0
        victim.running = False
        victim.preemptions += 1
        if not victim.in_flight:
          victim.drafts = 0
        step.preempted.append(victim.slot)
      if r in running:
        self._take(r, grants[r.slot], demand, step, served)

  def _verify(self, extra, step, served):
    """Adds drafts as long as pages are free; returns the budget that they leave."""
    full = False
    for r in served:
      wanted = extra.get(r.slot, 0)
      if not wanted:
        continue
      end = r.computed + step.tokens[r.slot]
      pages = max(self._pages_for(end + wanted) - r.pages, 0)
      full |= pages > self.free
      if full:
        wanted, pages = min(wanted, r.pages * self.config.cache.page_size - end), 0
      r.pages += pages
      self.free -= pages
      step.tokens[r.slot] += wanted
      step.drafts[r.slot] = wanted
    return sum(extra.values()) - sum(step.drafts.values())


class DraftTwins(scheduling.Twins):
  """As `Twins`; a commit says how many drafts were right and how many new ones there are."""

  def __init__(self, config, reachable=True):
    super().__init__(config, reachable=False)
    self.lawful, self.oracle = reachable, DraftOracle(config)

  def schedule(self, params):
    before = scheduling.host(self.state)
    decision, step = super().schedule(params)
    slots = range(self.config.max_requests)
    drafts = {s: int(decision.drafts[s]) for s in slots}
    assert {s: d for s, d in drafts.items() if d} == {s: d for s, d in step.drafts.items() if d}
    assert (decision.drafts < np.maximum(decision.tokens, 1)).all()
    if self.lawful and self.config.ordering == "fcfs":
      check_no_decode_waits(before, decision)
    return decision, step

  def commit(self, stopped=frozenset(), outputs=None, proposed=None):
    decision, step = self.in_flight.pop(0)
    size = self.config.max_requests
    outputs = np.ones(size, np.int32) if outputs is None else np.asarray(outputs, np.int32)
    proposed = np.zeros(size, np.int32) if proposed is None else np.asarray(proposed, np.int32)
    mask = np.isin(np.arange(size), list(stopped))
    self.state, finished = self.commit_fn(
      self.state, decision, mask, outputs=outputs, proposed=proposed
    )
    expected = self.oracle.commit(step, stopped, outputs.tolist(), proposed.tolist())
    assert sorted(np.flatnonzero(finished)) == sorted(expected)
    self.check()
    return expected

  def check(self):
    super().check()
    drafts = np.asarray(self.state.num_drafts)
    for r in self.oracle.requests:
      assert drafts[r.slot] == r.drafts, (r.slot, drafts[r.slot], r.drafts)


def check_no_decode_waits(before, decision):
  """Whatever drafts there are, everybody who decodes gets the token it needs."""
  ready = (before.status == Status.RUNNING) & (before.num_known - before.num_computed == 1)
  ready &= before.num_known < before.max_total
  ready &= ~((before.await_host | (before.num_drafts > 0)) & (before.num_in_flight > 0))
  ready &= ~decision.preempted
  assert (decision.tokens - decision.drafts)[ready].tolist() == [1] * ready.sum(), "a decode waited"
