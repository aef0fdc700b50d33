"""The prefix cache in plain Python: a pool of dicts and lists, and schedulers that use it.

Nothing is cut or clever: every page has its holders counted, its content in a dict, and a place in
a list of free pages. A step is decided first; then hits are taken, then pages handed out, then
shared with those who wait for nobody's sake but that of the same step.
"""

import collections
import copy
import functools

from tests.testing.own_policy_oracles import SloAware
from tests.testing.policy_oracles import ORACLES


class Pool:
  """Pages by number; `empty` is a stack, `cached` is in order of eviction."""

  def __init__(self, num_pages):
    self.refs = dict.fromkeys(range(num_pages), 0)
    self.content = {}  # page -> digest
    self.page_of = {}  # digest -> page
    self.empty = list(range(num_pages))[::-1]
    self.cached = collections.OrderedDict()
    self.evicted = 0

  def lookup(self, digests):
    pages = []
    for digest in digests:
      if digest not in self.page_of:
        break
      pages.append(self.page_of[digest])
    return pages

  def acquire(self, pages):
    for page in pages:
      self.cached.pop(page, None)
      self.refs[page] += 1

  def allocate(self):
    if self.empty:
      page = self.empty.pop()
    else:
      page, _ = self.cached.popitem(last=False)
      del self.page_of[self.content.pop(page)]
      self.evicted += 1
    self.refs[page] = 1
    return page

  def publish(self, page, digest):
    old = self.page_of.get(digest)
    if old is not None:
      del self.content[old]
      if old in self.cached:
        del self.cached[old]
        self.empty.append(old)
    self.page_of[digest], self.content[page] = page, digest

  def release(self, pages):
    for page in pages:
      self.refs[page] -= 1
    free = [page for page in pages if self.refs[page] == 0]
    self.empty += [page for page in free if page not in self.content]
    for page in reversed(free):
      if page in self.content:
        self.cached[page] = None
    return len(free)

  def reset(self):
    self.empty = list(self.cached)[::-1] + self.empty
    self.cached, self.content, self.page_of = collections.OrderedDict(), {}, {}

  @property
  def num_free(self):
    return len(self.empty) + len(self.cached)


class Cached:
  """Mixed into a scheduling loop: its requests have digests, tables and hits."""

  def __init__(self, config):
    super().__init__(config)
    self.pool = Pool(config.cache.num_pages)

  def submit(self, num_prompt, max_total, priority=0, await_host=False, digests=(), reads=True):
    slot = super().submit(num_prompt, max_total, priority, await_host)
    if slot is not None:
      r = self.requests[-1]
      r.digests, r.reads, r.table, r.published, r.full = list(digests), reads, [], 0, 0
      r.hits, r.source = 0, None
    return slot

  def abort(self, slot):
    if any(r.slot == slot for r in self.requests):
      self._publish()
    super().abort(slot)

  def commit(self, step, stopped, digests=None):
    finished = []
    for r in [r for r in step.sampled if r in self.requests]:
      r.in_flight -= 1
      r.digests += [digests[r.slot]] if digests and r.slot in digests else []
      if r.slot in stopped or r.known - r.in_flight >= r.max_total:
        finished.append(r)
    if finished:
      self._publish()
    for r in self._sorted(finished):
      self._end(r)
    return [r.slot for r in finished]

  def schedule(self, params):
    self._publish()
    self.before = self.running()
    step = super().schedule(params)
    return step

  def _ask(self, r, params):
    return min(super()._ask(r, params), r.known - r.computed)

  def _publish(self):
    for r in sorted(self.requests, key=lambda r: r.slot):
      known = min(r.full, len(r.digests))
      for i in range(r.published, known):
        self.pool.publish(r.table[i], r.digests[i])
      r.published = max(r.published, known)

  def _begin(self, r, step):
    page_size = self.config.cache.page_size
    tokens = r.known - (1 if self.config.recompute_last_page else 0)
    digests = r.digests[: tokens // page_size] if r.reads else []
    pages = self.pool.lookup(digests)
    r.hits, r.source, taken = len(pages), None, 0
    for other in self.before + [q for q in self.requests if q.slot in step.admitted]:
      if other.slot in step.preempted:
        continue
      shared = 0
      while (
        shared < min(len(digests), len(other.digests))
        and digests[shared] == other.digests[shared]
      ):  # fmt: skip
        shared += 1
      full = min((other.computed + step.tokens.get(other.slot, 0)) // page_size, shared)
      if full > r.hits:
        r.hits, r.source = full, other
      if other.slot in step.admitted:
        taken = max(taken, min(shared, other.hits))
    r.pages, r.computed = r.hits, min(r.hits * page_size, r.known - 1)
    return 0 if r.source else sum(self.pool.refs[page] == 0 for page in pages[taken:])

  def _turn_away(self, r):
    r.pages = r.computed = r.hits = 0

  def _release(self, r):
    freed = self.pool.release(r.table)
    self.free += freed
    r.table, r.pages, r.published, r.full, r.hits = [], 0, 0, 0, 0

  def _finish_step(self, step, served):
    page_size, evicted = self.config.cache.page_size, self.pool.evicted
    newcomers = [r for r in served if r.slot in step.admitted]
    for r in newcomers:
      pages = [None] * r.hits if r.source else self.pool.lookup(r.digests[: r.hits])
      self.pool.acquire([p for p in pages if p is not None])
      r.table, r.published = pages, r.hits
    for r in [r for r in self.before if r in served] + newcomers:
      r.table = r.table + [self.pool.allocate() for _ in range(r.pages - len(r.table))]
    for r in newcomers:
      if r.source:
        r.table[: r.hits] = r.source.table[: r.hits]
        self.pool.acquire(r.table[: r.hits])
        r.source = None
    step.cached = {r.slot: r.computed for r in newcomers if r.hits}
    super()._finish_step(step, served)
    for r in served:
      r.full = r.computed // page_size
    step.evicted = self.pool.evicted - evicted
    assert self.pool.num_free == self.free


class CachedSlo(Cached, SloAware):
  """What newcomers would take is measured a second time, from where their hits let them begin."""

  def allot(self, params):
    self.allotted = super().allot(params)
    twin, allotted = copy.deepcopy(self), self.allotted
    twin.allot = lambda params: allotted
    step = twin.schedule(params)
    decodes = [r for r in self.running() if r.known - r.computed == 1 and r.slot in step.tokens]
    slots = {r.slot: r for r in self.requests}
    chunks, cut, wish = [], False, dict(self.allotted)
    for slot in [s for s in step.order if slots[s] not in decodes]:
      tokens, prefix = step.tokens[slot], step.start[slot]
      kept = 0
      while not cut and kept < tokens and self.predict(
        self.hyper(params), chunks + [(kept + 1, prefix)], decodes
      ):  # fmt: skip
        kept += 1
      if kept < tokens:
        kept = 0 if cut else self.cut_at(kept, tokens, tokens, chunks + decodes, params)
        cut = True
      wish[slot] = kept
      if kept:
        chunks.append((kept, prefix))
    if cut:
      wish |= {r.slot: 0 for r in self.requests if r.slot not in step.tokens}
    return wish


@functools.cache
def cached(policy):
  """The scheduling loop of a policy, with a prefix cache."""
  if policy == "slo_aware":
    return CachedSlo
  return type(f"Cached{ORACLES[policy].__name__}", (Cached, ORACLES[policy]), {})
