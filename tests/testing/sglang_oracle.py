"""SGLang's scheduling round as its program tells it: lists of requests, one verdict at a time.

A request that has ended stays in `batch` and `last` until they are filtered, as there.
"""

import itertools
import math

import numpy as np

from jaxserve import sched
from tests.testing.oracle import Oracle, Step

ONE = 1 << 30  # the new-token ratio is kept in these units, so that both sides round alike


def units(ratio):
  return int(np.float32(ratio) * np.float32(ONE))


class Budget:
  """What a prefill batch may still take; floats only where the ratio enters."""

  def __init__(self, free, riders, reserved, max_prefill, chunk, page, overhead):
    self.free, self.reserved, self.page, self.overhead = free, reserved, page, overhead
    self.charged = self.current = riders
    self.inputs, self.chunk = max_prefill - riders, chunk - riders
    self.real = chunk - riders
    self.beside_chunk = False

  def ceil(self, tokens):
    return -(-tokens // self.page) * self.page

  def total(self):
    return self.free - self.charged

  def covers(self, tokens):
    """tokens < free - charged - reserved."""
    return self.reserved < np.float32(self.total() - tokens)

  def take(self, tokens, outputs):
    billed = self.ceil(tokens)
    self.inputs -= billed
    self.chunk -= billed
    self.real -= tokens
    self.charged += billed + self.overhead + outputs
    self.current += billed + self.overhead


class SGLang(Oracle):
  mixed = False

  def __init__(self, config):
    super().__init__(config)
    self.batch, self.last, self.chunked = [], [], None
    self.full, self.ratio, self.countdown = False, None, 0
    self.tail, self.place = itertools.count(), {}

  def submit(self, *args, **kwargs):
    slot = super().submit(*args, **kwargs)
    if slot is not None:
      self.place[self.requests[-1].arrival] = next(self.tail)
    return slot

  def _sorted(self, requests):
    if self.config.ordering == "priority":
      return super()._sorted(requests)
    return sorted(requests, key=lambda r: self.place[r.arrival])

  def alive(self, r):
    return any(r is other for other in self.requests)

  def schedule(self, params):
    step, served = Step([], {}, {}, [], [], []), []
    order = {r.arrival: i for i, r in enumerate(self.running() + self.waiting())}
    self.decide(params, step, served)
    served.sort(key=lambda r: order[r.arrival])
    self._finish_step(step, served)
    return step

  def decide(self, params, step, served):
    self.read(params)
    self.fold()
    taken = []
    if self.interval and self.countdown:
      self.countdown -= 1
    else:
      taken = self.form_prefill(params, step, served)
    if taken:
      self.countdown, self.last = self.interval, taken
      if self.mixed and self.batch:
        self.mix(params, step, served)
      return
    self.batch, ghosts = [r for r in self.batch if self.alive(r)], len(self.batch)
    ghosts -= len(self.batch)
    self.full = self.full and not ghosts
    if self.batch:
      self.decode(params, step, served)
    else:
      self.ratio = self.first

  def read(self, params):
    given = dict(sched.POLICIES["sglang"].defaults) | dict(params.policy)
    size = int(given["chunked_prefill_size"])
    self.chunking = params.chunked and size > 0
    self.chunk = min(size, params.budget) if self.chunking else params.budget
    self.page = self.config.cache.page_size
    self.interval = int(given["prefill_decode_interval"])
    self.clip = int(given["clip_max_new_tokens"])
    self.max_prefill = int(given["max_prefill_tokens"])
    self.overhead = self.page if given["page_overhead"] else 0
    self.gate = bool(given["legacy_rem_input_gate"]) or not self.chunking
    self.retract_steps = int(given["retract_decode_steps"])
    ratio = np.float32(given["init_new_token_ratio"])
    ratio = min(ratio * np.float32(given["schedule_conservativeness"]), np.float32(1))
    self.first = units(ratio)
    self.floor = units(ratio * np.float32(given["min_new_token_ratio_factor"]))
    steps = int(given["new_token_ratio_decay_steps"])
    self.decay = (self.first - self.floor + steps // 2) // steps
    self.ratio = self.first if self.ratio is None else self.ratio

  def fold(self):
    if self.chunked is not None and not self.alive(self.chunked):
      self.chunked = None
    if not self.last:
      return
    rows = [r for r in self.last if self.alive(r) and r is not self.chunked]
    if len(rows) < len(self.last):
      self.full = False
    if rows and not self.batch:
      self.full = False  # the last batch takes the place of the empty one, flag and all
    self.batch, self.last = self.batch + rows, []

  def outputs_left(self, r):
    return min(max(r.max_total - r.known, 0), self.clip)

  def outputs(self, r):
    return r.known - r.num_prompt

  def most_outputs(self, r):
    return min(r.max_total - r.num_prompt, self.clip)

  def page_needs(self, params):
    """Pages that the decodes of this step need: [(request, pages)]."""
    rows = [r for r in self.batch if self.alive(r) and not self._idle(r)]
    rows = self._sorted(rows)[: params.budget]
    return [(r, max(self._pages_for(r.computed + 1) - r.pages, 0)) for r in rows]

  def form_prefill(self, params, step, served):
    waiting = [r for r in self.waiting() if not self._idle(r)]
    if self.chunked is None and (not waiting or (self.full and self.batch)):
      return []
    seats = params.max_num_seqs - max(len(self.batch), len(self.running()))
    riders = len(self.batch) if self.mixed else 0
    kept = sum(pages for _, pages in self.page_needs(params)) if self.mixed else 0
    left = sum(self.outputs_left(r) for r in self.batch)
    reserved = np.float32(self.ratio) * np.float32(1 / ONE) * np.float32(left)
    budget = Budget(
      self.free * self.page, riders, reserved, self.max_prefill, self.chunk, self.page,
      self.overhead,
    )  # fmt: skip
    taken, budget.beside_chunk = [], self.chunked is not None
    if self.chunked is not None:
      taken, stalled = self.continue_chunk(budget, kept, step, served)
      if stalled:
        return taken
    for r in waiting:
      if len(taken) >= seats:
        self.full = True
        break
      verdict = self.add(r, budget, kept, taken, params, step, served)
      if verdict != "continue":
        self.full = self.full or verdict == "no token"
        break
    return taken

  def continue_chunk(self, budget, kept, step, served):
    """([the request] if it gets anything, whether it gets less than the budgets give)."""
    r, need = self.chunked, self.chunked.known - self.chunked.computed
    limit = min(budget.chunk if self.chunking else budget.real,
                budget.total() - math.ceil(budget.reserved))  # fmt: skip
    if limit <= 0:
      limit = budget.chunk if self.chunking else budget.real
    wanted = min(need, limit)
    tokens = min(wanted, (self.free - kept + r.pages) * self.page - r.computed)
    if tokens <= 0:
      return [], True
    self._take(r, tokens, max(self._pages_for(r.computed + tokens) - r.pages, 0), step, served)
    ends = tokens == need
    budget.take(tokens, self.most_outputs(r) if ends else 0)
    if ends:
      self.chunked = None
    return [r], tokens < wanted

  def add(self, r, budget, kept, taken, params, step, served):
    need, page = r.known, self.page
    alone = not self.batch and not taken
    if not alone and not budget.covers(need + self.outputs_left(r) + self.overhead):
      return "no token"
    if self.gate and taken and budget.ceil(need) >= budget.inputs:
      return "other"
    if self.chunking:
      unit = 1 if self.chunk < page else page
      fits = budget.ceil(need) <= budget.chunk
      tokens = need if fits else min(need, budget.chunk // unit * unit)
    else:
      tokens = need if need <= budget.real else budget.real if alone else 0
    if tokens <= 0:
      return "other"
    pages = self._pages_for(tokens)
    spare = params.watermark_pages if self.batch or budget.beside_chunk else 0
    if pages + spare + kept > self.free:
      return "other"
    self._take(r, tokens, pages, step, served)
    r.running = True
    step.admitted.append(r.slot)
    taken.append(r)
    if tokens < need:
      assert self.chunked is None, "two requests in the chunk slot"
      self.chunked = r
    budget.take(tokens, self.most_outputs(r) if tokens == need else 0)
    if budget.reserved >= np.float32(budget.total()) or budget.free - budget.current <= 0:
      return "no token"
    if budget.inputs <= 0 or (self.chunking and budget.chunk <= 0):
      return "other"
    return "continue"

  def mix(self, params, step, served):
    """The decodes join the prefill batch, and the decode set is empty until the next round."""
    self.batch = [r for r in self.batch if self.alive(r)]
    for r, pages in self.page_needs(params):
      self._take(r, 1, pages, step, served)
      self.last = [*self.last, r]
    self.batch = [r for r in self.batch if self._idle(r)]

  def decode(self, params, step, served):
    before, stay = len(self.batch), self.page_needs(params)
    held_by_chunk_only = self.chunked is not None and not any(
      self._idle(r) for r in self.requests if r.running
    )
    least = 0 if held_by_chunk_only else 1
    lacked = sum(pages for _, pages in stay) > self.free
    while sum(pages for _, pages in stay) > self.free and len(stay) > least:
      # A stable sort: equal ones stay in order of admission.
      stay.sort(key=lambda item: (self.outputs(item[0]), -item[0].num_prompt), reverse=True)
      self.retract(stay.pop()[0], step)
    if len(self.batch) < before:
      self.full = False
      outputs = sum(self.outputs(r) + self.retract_steps for r in self.batch)
      most = sum(r.max_total - r.num_prompt for r in self.batch)
      self.ratio = units(min(np.float32(outputs) / np.float32(most + 1), np.float32(1)))
    elif not lacked:
      self.ratio = max(self.ratio - self.decay, self.floor)
    if sum(pages for _, pages in stay) <= self.free:
      for r, pages in stay:
        self._take(r, 1, pages, step, served)

  def retract(self, r, step):
    self.batch = [other for other in self.batch if other is not r]
    self.free += r.pages
    r.pages = r.computed = 0
    r.running = False
    r.preemptions += 1
    step.preempted.append(r.slot)
    if self.config.ordering == "fcfs":
      self.place[r.arrival] = next(self.tail)


class SGLangMixed(SGLang):
  mixed = True


def random_arguments(rng):
  """Hyper-parameters for lives on a small pool."""
  arguments = {
    "chunked_prefill_size": int(rng.choice([2, 3, 4, 6, 9, 11, 17, 1000])),
    "max_prefill_tokens": int(rng.choice([1, 6, 10, 1000])),
    "prefill_decode_interval": int(rng.integers(0, 3)),
    "schedule_conservativeness": float(rng.choice([0.0, 0.3, 1.0, 2.5])),
    "init_new_token_ratio": float(rng.choice([0.5, 0.7])),
    "new_token_ratio_decay_steps": int(rng.choice([3, 600])),
    "retract_decode_steps": int(rng.choice([0, 3, 20])),
    "clip_max_new_tokens": int(rng.choice([0, 2, 4096])),
    "page_overhead": int(rng.integers(0, 2)),
    "legacy_rem_input_gate": int(rng.integers(0, 2)),
  }
  return {name: value for name, value in arguments.items() if rng.random() < 0.6}
