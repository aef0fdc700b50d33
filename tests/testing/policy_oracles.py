"""The policies as plain loops, as their papers and programs tell them.

Each subclass only says how a step is decided; requests live and die as in `oracle.Oracle`.
"""

from tests.testing import own_policy_oracles as own
from tests.testing.oracle import Oracle, Step
from tests.testing.sglang_oracle import SGLang, SGLangMixed


class LoopOracle(Oracle):
  """Common moves; `decide` is the policy."""

  def schedule(self, params):
    step, served = Step([], {}, {}, [], [], []), []
    self.left = params.budget
    self.decide(params, step, served)
    served.sort(key=lambda r: (r.slot in step.admitted, self._place(r)))
    self._finish_step(step, served)
    return step

  def _place(self, r):
    return self._sorted(self.requests).index(r)

  def is_decode(self, r):
    return r.known - r.computed == 1

  def cap(self, r, params):
    return r.known - r.computed

  def decode_all(self, params, step, served, evict=True):
    """Every decode in order; with no page left, the latest runner goes."""
    running = self.running()
    for r in list(running):
      if r not in running or not self.is_decode(r) or self._idle(r):
        continue
      tokens = min(1, self.left)
      if not tokens:
        continue
      while evict and self.free == 0 and r in running:
        if [one for one in running if one.pages] == [r] and not self._lacks_page(r):
          break
        self._evict(running.pop(), step)
      if r in running:
        demand = max(self._pages_for(r.computed + 1) - r.pages, 0)
        self._take(r, 1, demand, step, served)
        self.left -= 1

  def _lacks_page(self, r):
    return self._pages_for(r.computed + 1) > r.pages

  def continue_prompts(self, params, step, served):
    for r in self.running():
      if self.is_decode(r) or self._idle(r) or r.slot in step.preempted:
        continue
      tokens = min(self.cap(r, params), self.left)
      if tokens:
        self._take(r, tokens, 0, step, served)
        self.left -= tokens

  def admit(self, params, step, served, whole=False, pages=None):
    if step.preempted:
      return
    seats = len(self.running())
    for r in self.waiting():
      if self._idle(r):
        continue
      unheld = self._begin(r, step)
      need = self.cap(r, params)
      tokens = min(need, self.left)
      given = (self._pages_for(r.known) if pages is None else pages) - r.pages
      spare = params.watermark_pages if seats else 0
      whole_only = whole or not params.chunked
      if (
        not tokens
        or seats >= params.max_num_seqs
        or (whole_only and tokens < need <= params.budget)
      ):
        return self._turn_away(r)
      if given + unheld + spare > self.free:
        return self._turn_away(r)
      self.free -= unheld
      self._take(r, tokens, given, step, served)
      r.running = True
      step.admitted.append(r.slot)
      seats += 1
      self.left -= tokens


class Sarathi(LoopOracle):
  def decide(self, params, step, served):
    self.decode_all(params, step, served)
    self.continue_prompts(params, step, served)
    self.admit(params, step, served)


class SarathiDynamic(Sarathi):
  def cap(self, r, params):
    low, high, stages, most = 512, 2048, 4, 8192
    stage = min(r.computed // -(-most // stages), stages - 1)
    sizes = [(high - (high - low) * k // (stages - 1)) // 32 * 32 for k in range(stages)]
    return min(r.known - r.computed, sizes[stage])


class PrefillFirst(LoopOracle):
  def decide(self, params, step, served):
    self.continue_prompts(params, step, served)
    self.admit(params, step, served, whole=True)
    if not step.tokens:
      self.decode_all(params, step, served)


class Orca(LoopOracle):
  def decide(self, params, step, served):
    self.decode_all(params, step, served, evict=False)
    self.continue_prompts(params, step, served)
    self.admit(params, step, served, whole=True, pages=self.config.pages_per_request)


class Static(LoopOracle):
  def decide(self, params, step, served):
    if self.running():
      self.decode_all(params, step, served, evict=False)
      self.continue_prompts(params, step, served)
    else:
      self.admit(params, step, served, whole=True, pages=self.config.pages_per_request)


class SimpleChunking(LoopOracle):
  memory = "prefill"

  def decide(self, params, step, served):
    turns = [self.prefill_turn, self.decode_turn]
    for turn in turns if self.memory == "prefill" else turns[::-1]:
      turn(params, step, served)
      if step.tokens or step.preempted:
        self.memory = "decode" if turn == self.prefill_turn else "prefill"
        return

  def prefill_turn(self, params, step, served):
    self.continue_prompts(params, step, served)
    if not step.tokens:
      self.admit(params, step, served)

  def decode_turn(self, params, step, served):
    self.decode_all(params, step, served)


ORACLES = {
  "vllm_v1": Oracle,
  "sarathi": Sarathi,
  "sarathi_dynamic": SarathiDynamic,
  "slo_aware": own.SloAware,
  "bucket_shaped": own.BucketShaped,
  "prefill_first": PrefillFirst,
  "orca": Orca,
  "static": Static,
  "simple_chunking": SimpleChunking,
  "sglang": SGLang,
  "sglang_mixed": SGLangMixed,
}
