"""An engine's two halves without its loop: programs of one configuration, called one by one."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import sched
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.engine import Engine, EngineConfig, attention, compiler, devices
from jaxserve.engine.model_runner import ModelRunner
from jaxserve.engine.planner import Planner
from jaxserve.engine.store import ExecutableStore
from jaxserve.model import llama
from jaxserve.pytree import unpack
from jaxserve.sched import packing

_SCHEDULER = ("init", "schedule", "commit", "abort", "submit", "lay_out")


class Weights:
  """A model, loaded once for all configurations."""

  def __init__(self, checkpoint, dtype):
    self.config, self.dtype = checkpoint.config, dtype
    self.graphdef, self.leaves = llama.load(checkpoint.config, checkpoint.params, jnp.dtype(dtype))


def engine_config(weights, *, rows, length, pages, budget, buckets, page_size, requests=None,
                  prefix=False):  # fmt: skip
  """Of an engine with `rows` seats and as many slots for those who wait."""
  return EngineConfig(
    model=weights.config, dtype=weights.dtype, token_buckets=buckets,
    scheduler=SchedulerConfig(
      cache=CacheConfig(num_pages=pages, page_size=page_size), max_num_seqs=rows,
      max_requests=requests or 2 * rows, max_budget=budget, max_model_len=length,
      prefix_cache=prefix,
    ),
  )  # fmt: skip


class Bench:
  """Programs of one configuration.

  Args:
    weights: the model.
    config: what to compile for.
    cache_dir: of executables.
    with_model: compile the model's too.
    decodes_only: of the model's, the first bucket and the head for all rows alone.
  """

  def __init__(self, weights, config, cache_dir, with_model=True, decodes_only=False):
    where = devices.pick()
    self.config = attention.resolve(config, where.model)
    programs = Engine.programs(self.config, weights.graphdef, weights.leaves)
    wanted = (*_SCHEDULER, "empty", "forward", "sample") if with_model else _SCHEDULER
    unused = set()
    if decodes_only:
      unused = {("sample", rows) for rows in self.config.rows[:-1]}
      unused |= {("forward", bucket) for bucket in self.config.buckets[1:]}
    programs = [p for p in programs if p.key[0] in wanted and p.key not in unused]
    self.table = compiler.compile_all(programs, store=ExecutableStore(cache_dir / "executables"))
    self.planner = Planner(self.config, self.table, where)
    self.planner.set_params(sched.make_params(self.config.scheduler))
    self.runner = None
    if with_model:
      self.runner = ModelRunner(self.config, weights.leaves, self.table, where.model, None)
    self._rng, self._unpack = np.random.default_rng(0), None

  def submit(self, prompt):
    """A request of so many tokens that goes on for ever; its slot."""
    scheduler, reuse = self.config.scheduler, ()
    if scheduler.prefix_cache:
      pages = prompt // scheduler.cache.page_size
      digests = self._digests(scheduler.pages_per_request)
      reuse = digests, np.int32(pages), np.bool_(True)
    return self.planner.submit(prompt, scheduler.max_model_len, 0, False, reuse)

  def decodes(self, rows, context):
    """Serves `rows` prompts until all of them decode; (plan, bucket) of that step."""
    self.planner.clear()
    for _ in range(rows):
      self.submit(context)
    while True:
      packed = self.planner.schedule()
      decision = self.unpack(packed)
      if int(decision.num_scheduled) == int(decision.num_tokens) == rows:
        if decision.start[decision.order[:rows]].min() >= context:
          break
      self.commit(packed)
    bucket = next(b for b in self.config.buckets if b >= rows)
    plan = self.planner.plan(packed, bucket)
    self.commit(packed)
    return plan, bucket

  def prefill(self, tokens, prompt):
    """(plan, bucket, rows) of a step of so many tokens, all of whole prompts."""
    self.planner.clear()
    lengths = [min(prompt, tokens - at) for at in range(0, tokens, prompt)]
    for length in lengths:
      self.submit(length)
    packed = self.planner.schedule()
    assert int(self.unpack(packed).num_tokens) == tokens
    bucket = next(b for b in self.config.buckets if b >= tokens)
    return self.planner.plan(packed, bucket), bucket, len(lengths)

  def unpack(self, packed):
    """A decision on the host."""
    return unpack(np.asarray(packed), packing.decision_like(self.config.scheduler))

  def commit(self, packed):
    """Nobody stops; with a prefix cache, no page becomes known."""
    scheduler, more = self.config.scheduler, ()
    if scheduler.prefix_cache:
      more = (np.zeros((scheduler.max_requests, 4), np.uint32),)
    return self.planner.commit(packed, [], *more)

  def model_step(self, plan, bucket, rows):
    """Seconds of the forward pass and the head."""
    begin = time.perf_counter()
    _, output, _ = self.runner.run(plan, None, bucket, rows, any_samples=True)
    jax.block_until_ready(output)
    self.runner.wait()
    return time.perf_counter() - begin

  def scheduler_step(self, rows):
    """Seconds of each call of one step of decodes, and of a submit that has to wait."""
    seconds = {}

    def timed(name, call, *args):
      begin = time.perf_counter()
      result = jax.block_until_ready(call(*args))
      seconds[name] = time.perf_counter() - begin
      return result

    packed = timed("schedule", self.planner.schedule)
    bucket = next(b for b in self.config.buckets if b >= rows)
    timed("lay_out", self.planner.plan, packed, bucket)
    timed("commit", self.commit, packed)
    slot = timed("submit", self.submit, self.config.scheduler.cache.page_size)
    timed("abort", self.planner.abort, [slot])
    return seconds

  def _digests(self, count):
    return self._rng.integers(1, 1 << 32, (count, 4), np.uint32)


def interleaved(calls, rounds, steps, on_round=lambda count: None):
  """Per call, the least of the rounds' medians of `steps` results, in microseconds.

  A result is seconds, or a mapping of them. All calls of a round come in turn, so that what else
  the machine does falls upon all alike.
  """
  found = [[] for _ in calls]
  for number in range(rounds + 1):
    for call, kept in zip(calls, found, strict=True):
      results = [call() for _ in range(steps)]
      if number:  # the first round warms up
        kept.append(_median(results))
    on_round(1)
  return [_least(kept) for kept in found]


def _median(results):
  if not isinstance(results[0], dict):
    return statistics.median(results)
  return {key: statistics.median(result[key] for result in results) for key in results[0]}


def _least(medians):
  if not isinstance(medians[0], dict):
    return 1e6 * min(medians)
  return {key: 1e6 * min(one[key] for one in medians) for key in medians[0]}
