"""A sequential scheduler in plain Python: the loop whose closed form jaxserve.sched computes.

Deliberately naive: lists of mutable requests, one decision at a time, no arrays.
"""

import dataclasses

from jaxserve.config import SchedulerConfig


@dataclasses.dataclass
class Request:
  slot: int
  arrival: int
  priority: int
  num_prompt: int
  max_total: int
  await_host: bool
  known: int
  computed: int = 0
  pages: int = 0
  in_flight: int = 0
  preemptions: int = 0
  running: bool = False


@dataclasses.dataclass
class Params:
  budget: int
  max_num_seqs: int
  threshold: int = 0
  cap_when_alone: bool = True
  chunked: bool = True
  watermark_pages: int = 0
  policy: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Step:
  order: list[int]
  tokens: dict[int, int]
  start: dict[int, int]
  admitted: list[int]
  preempted: list[int]
  sampled: list[Request]


class Oracle:
  """Same life cycle as the pure functions: submit, abort, schedule, commit."""

  def __init__(self, config: SchedulerConfig):
    self.config = config
    self.free = config.cache.num_pages
    self.requests: list[Request] = []
    self.submitted = 0

  def submit(self, num_prompt, max_total, priority=0, await_host=False):
    used = {r.slot for r in self.requests}
    slots = [s for s in range(self.config.max_requests) if s not in used]
    if not slots:
      return None
    self.requests.append(
      Request(slots[0], self.submitted, priority, num_prompt, max_total, await_host, num_prompt)
    )
    self.submitted += 1
    return slots[0]

  def abort(self, slot):
    for r in [r for r in self.requests if r.slot == slot]:
      self._end(r)

  def commit(self, step: Step, stopped: set[int]):
    finished = []
    for r in step.sampled:
      if r not in self.requests:
        continue
      r.in_flight -= 1
      if r.slot in stopped or r.known - r.in_flight >= r.max_total:
        self._end(r)
        finished.append(r.slot)
    return finished

  def schedule(self, params: Params) -> Step:
    step = Step([], {}, {}, [], [], [])
    served: list[Request] = []
    left = self._serve_running(params, step, served)
    if not step.preempted:
      self._admit(params, step, served, left)
    self._finish_step(step, served)
    return step

  def _finish_step(self, step, served):
    for r in served:
      r.computed += step.tokens[r.slot]
      if r.computed == r.known:
        r.known += 1
        r.in_flight += 1
        step.sampled.append(r)
    step.order = [r.slot for r in served]

  def running(self):
    return self._sorted(r for r in self.requests if r.running)

  def waiting(self):
    return self._sorted(r for r in self.requests if not r.running)

  def _sorted(self, requests):
    by_priority = self.config.ordering == "priority"
    return sorted(requests, key=lambda r: (r.priority if by_priority else 0, r.arrival))

  def _end(self, r):
    self._release(r)
    self.requests.remove(r)

  def _evict(self, victim, step):
    self._release(victim)
    victim.computed = 0
    victim.running = False
    victim.preemptions += 1
    step.preempted.append(victim.slot)

  def _release(self, r):
    self.free += r.pages
    r.pages = 0

  def _begin(self, r, step):
    """What a newcomer finds in a prefix cache: pages of it that nobody holds. Here: nothing."""
    return 0

  def _turn_away(self, r):
    """Undoes `_begin`."""

  def _idle(self, r):
    return r.known >= r.max_total or (r.await_host and r.in_flight > 0)

  def _ask(self, r, params):
    need = 0 if self._idle(r) else r.known - r.computed
    alone = len(self.requests) == 1
    if params.threshold and (params.cap_when_alone or not alone):
      need = min(need, params.threshold)
    return need

  def _pages_for(self, tokens):
    return -(-tokens // self.config.cache.page_size)

  def _serve_running(self, params, step, served):
    left, running, i = params.budget, self.running(), 0
    while i < len(running):
      r = running[i]
      i += 1
      tokens = min(self._ask(r, params), left)
      if tokens == 0:
        continue
      demand = max(self._pages_for(r.computed + tokens) - r.pages, 0)
      while demand > self.free and r in running:
        self._evict(running.pop(), step)
      if r not in running:
        break
      self._take(r, tokens, demand, step, served)
      left -= tokens
    return left

  def _admit(self, params, step, served, left):
    seats = len(self.running())
    promised = sum(
      max(self._pages_for(r.known) - r.pages, 0)
      for r in self.running()
      if not self._idle_after(r, step)
    )
    for r in self.waiting():
      if self._idle(r):
        continue
      unheld = self._begin(r, step)
      ask = self._ask(r, params)
      tokens = min(ask, left)
      if (
        seats >= params.max_num_seqs
        or tokens == 0
        or (not params.chunked and tokens < ask <= params.budget)
      ):
        return self._turn_away(r)
      demand = self._pages_for(r.computed + tokens) - r.pages
      whole = self._pages_for(r.known) - r.pages
      wanted = {"growth": promised + whole, "gate": whole, "none": demand}[self.config.reserve]
      if wanted + unheld + (params.watermark_pages if seats else 0) > self.free:
        return self._turn_away(r)
      self.free -= unheld
      self._take(r, tokens, demand, step, served)
      r.running = True
      step.admitted.append(r.slot)
      promised += whole - demand
      seats += 1
      left -= tokens

  def _idle_after(self, r, step):
    # A running request that sat this step out promises nothing more.
    return r.slot not in step.tokens and self._idle(r)

  def _take(self, r, tokens, demand, step, served):
    self.free -= demand
    r.pages += demand
    step.tokens[r.slot] = tokens
    step.start[r.slot] = r.computed
    served.append(r)
