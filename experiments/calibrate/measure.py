"""What steps of the engine take, over plans that are designed to tell costs apart."""

import dataclasses
import itertools
import statistics

import numpy as np

from jaxserve import sched
from jaxserve.cost_profile import StepWork
from jaxserve.engine import SamplingParams
from jaxserve.progress import progress

_SAME = 4  # steps of decodes alone that are taken together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Requests that are there at once, and the budget that cuts the last one into chunks.

  Attributes:
    kind: decode, prefill or mixed.
    rows: requests that decode.
    context: prompt tokens of each of them.
    outputs: of each of them.
    chunk: tokens of a chunk of the long prompt.
    prompt: tokens of the long prompt; 0: there is none.
  """

  kind: str
  rows: int = 0
  context: int = 0
  outputs: int = 0
  chunk: int = 0
  prompt: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
  """One kind of step: what it had to compute, and the seconds it took, a value for each round."""

  kind: str
  work: StepWork
  seconds: tuple[float, ...]

  @property
  def median(self):
    return statistics.median(self.seconds)


def design(buckets, seats, length):
  """Decodes by rows and context, chunks by length and prefix, and both in one step."""
  long = length - 32
  contexts = sorted({min(x, long) for x in (32, 256, long // 2)})
  rows = sorted({1, max(seats // 2, 1), seats})
  plans = [
    Plan(kind="decode", rows=r, context=c, outputs=17) for r, c in itertools.product(rows, contexts)
  ]
  chunks = [bucket for bucket in buckets if bucket >= 16]
  plans += [Plan(kind="prefill", chunk=c, prompt=min(10 * c, long)) for c in chunks]
  for riders in sorted({max(seats // 2, 1), seats - 1} - {0}):
    for bucket in [c for c in chunks if c > 2 * riders][::2]:
      chunk = bucket - riders
      prompt = min(6 * chunk, long)
      plans.append(
        Plan(
          kind="mixed", rows=riders, context=contexts[0 if riders == seats - 1 else -1] // 2,
          outputs=-(-prompt // chunk) + 6, chunk=chunk, prompt=prompt,
        )
      )  # fmt: skip
  return plans


def observe(engine, plans, rounds, desc="Measuring steps"):
  """Every plan, `rounds` times in turn, so that a slow minute falls upon all alike."""
  seen: dict[tuple, list[float]] = {}
  with progress(rounds * len(plans), "plans", desc) as bar:
    for number in range(rounds):
      for plan in plans:
        for key, seconds in steps_of(engine, plan, seed=number):
          seen.setdefault((plan, *key), []).append(seconds)
        bar.advance(1)
  return [
    Observation(kind=plan.kind, work=work, seconds=tuple(times))
    for (plan, work), times in seen.items()
  ]


def steps_of(engine, plan, seed=0):
  """[((work,), seconds)] of the steps that a plan is about, decodes in medians of some steps."""
  timed = list(run(engine, plan, np.random.default_rng(seed)))
  if plan.kind != "decode":
    want = [x for x in timed if x[0].chunks and (x[0].decodes == plan.rows)]
    return [((work,), seconds) for work, seconds in want]
  want = [x for x in timed if x[0].decodes == plan.rows and not x[0].chunks]
  found = []
  for start in range(0, len(want), _SAME):
    some = want[start : start + _SAME]
    work = some[len(some) // 2][0]
    found.append(((work,), statistics.median(seconds for _, seconds in some)))
  return found


def run(engine, plan, rng):
  """(work, seconds) of every step but the first, which has nothing to overlap with."""
  vocab, config = engine.config.model.vocab_size, engine.config.scheduler
  whole = config.max_budget
  prompt = lambda size: rng.integers(0, vocab, size).tolist()
  before = engine.params
  last = None
  engine.set_params(sched.make_params(config, budget=whole))
  for _ in range(plan.rows):
    options = SamplingParams(max_tokens=plan.outputs, ignore_eos=True)
    engine.submit(prompt(plan.context), options)
  waits = plan.prompt
  while True:
    if waits and engine.num_requests == plan.rows and ready(plan, last):
      budget = max(plan.chunk + plan.rows, int(before.max_num_seqs))
      engine.set_params(sched.make_params(config, budget=budget))
      engine.submit(prompt(waits), SamplingParams(max_tokens=1))
      waits = 0
    events = engine.step()
    if events is None:
      break
    if last is not None:
      yield work_of(engine, events), events.done_s - max(last.done_s, events.dispatched_s)
    last = events
  engine.set_params(before)


def ready(plan, last):
  """All rows decode, so that the long prompt's chunks are what the budget leaves."""
  if not plan.rows:
    return True
  return last is not None and sum(not part.is_prefill for part in last.scheduled) == plan.rows


def work_of(engine, events):
  """What a step computed, in the cost model's terms."""
  return StepWork.of(
    [(part.tokens, part.start, not part.is_prefill) for part in events.scheduled],
    bucket=events.bucket, samples=any(part.samples for part in events.scheduled),
    row_buckets=engine.config.rows,
  )  # fmt: skip
