"""The policies of our own as plain loops: token by token, and by rehearsing a step.

Both first settle how much each request may compute, then let vLLM's loop hand out pages and seats.
"""

import copy

import numpy as np

from jaxserve import sched
from tests.testing.oracle import Oracle


class AllottedOracle(Oracle):
  """vLLM's loop, with what `allot` leaves of each request's wish; the rest as it asks."""

  allotted: dict[int, int] = {}

  def schedule(self, params):
    self.allotted = {}
    self.allotted = self.allot(params)
    return super().schedule(params)

  def _ask(self, r, params):
    return self.allotted.get(r.slot, super()._ask(r, params))

  def hyper(self, params):
    defaults = dict(sched.POLICIES[self.config.policy].defaults)
    return {k: np.float32(v) for k, v in (defaults | params.policy).items()}


class SloAware(AllottedOracle):
  def allot(self, params):
    wish = {r.slot: self._ask(r, params) for r in self.requests}
    decodes = [r for r in self.running() if r.known - r.computed == 1 and wish[r.slot]]
    chunks, left, cut = [], params.budget - len(decodes), False
    for r in self.running() + self.waiting():
      if r in decodes:
        continue
      most = min(wish[r.slot], left)
      tokens = 0 if cut else self.longest(r, most, chunks, decodes, params)
      if tokens < most:
        tokens = 0 if cut else self.cut_at(tokens, most, wish[r.slot], chunks + decodes, params)
        cut = True
      if cut or r.running:
        wish[r.slot] = tokens
      if tokens:
        chunks.append((tokens, r.computed))
        left = max(left - tokens, 0)
    return wish

  def longest(self, r, most, chunks, decodes, params):
    h, tokens = self.hyper(params), 0
    while tokens < most and self.predict(h, chunks + [(tokens + 1, r.computed)], decodes):
      tokens += 1
    return tokens

  def cut_at(self, tokens, most, wish, others, params):
    """What a prompt gets whose whole wish would miss the target."""
    if not params.chunked:
      return 0 if others else wish
    return tokens if others else max(tokens, min(most, int(self.hyper(params)["min_chunk"]) or 1))

  def predict(self, h, chunks, decodes):
    """Whether a step of (tokens, prefix) chunks keeps the target, in float32."""
    tokens = np.float32(len(decodes) + sum(n for n, _ in chunks))
    pairs = np.float32(sum(n * (2 * prefix + n) for n, prefix in chunks) / 2)
    resident = np.float32(sum(r.computed for r in decodes))
    time = max(h["token_ms"] * tokens, h["weights_ms"]) + h["pair_ms"] * pairs
    return time + h["kv_ms"] * resident <= h["itl_target_ms"]


class BucketShaped(AllottedOracle):
  def allot(self, params):
    """Rehearses the step; takes tokens from its tail, one by one, until a bucket is full."""
    twin = copy.deepcopy(self)
    decodes = {r.slot for r in self.running() if r.known - r.computed == 1}
    step = super(AllottedOracle, twin).schedule(params)
    given, total = dict(step.tokens), sum(step.tokens.values())
    buckets = self.buckets(params.budget)
    nothing_to_cut = not total or not params.chunked or step.preempted
    if nothing_to_cut or not self.pays(params, buckets, total):
      return {}
    chunks = [slot for slot in step.order if slot not in decodes]
    below = max(b for b in buckets if b <= total)
    if below <= total - sum(given[slot] for slot in chunks):
      return {}
    while total > below:
      last = [slot for slot in chunks if given[slot]][-1]
      given[last] -= 1
      total -= 1
    return {slot: given[slot] for slot in chunks} | {
      r.slot: 0 for r in self.requests if r.slot not in given
    }

  def pays(self, params, buckets, total):
    above = min(b for b in buckets if b >= total)
    return np.float32(above - total) > self.hyper(params)["max_padding"] * np.float32(above)

  def buckets(self, budget):
    most = self.config.max_budget
    coarse = {factor << k for factor in (64, 96) for k in range(12)}
    fine = set(range(0, most, 64 * -(-most // 512)))
    sizes = {1, 4, 8, 12, 16, 24, 32}
    sizes |= {s for s in coarse if most <= 512 or 2 * s < most} | {s for s in fine if 2 * s >= most}
    return {s for s in sizes if s < most} | {most, budget}


def random_args(policy, rng):
  """Hyper-parameters that matter in lives of a few tokens, as keyword arguments."""
  if policy == "slo_aware":
    return {
      "itl_target_ms": float(rng.uniform(1, 60)), "min_chunk": int(rng.integers(1, 6)),
      "token_ms": float(rng.uniform(0.1, 3)), "weights_ms": float(rng.uniform(0.1, 9)),
      "pair_ms": float(rng.uniform(0.01, 0.3)), "kv_ms": float(rng.uniform(0.01, 0.5)),
    }  # fmt: skip
  if policy == "bucket_shaped":
    return {"max_padding": float(rng.uniform(0.01, 0.4))}
  return {}
