"""What one scheduling step costs on the host: `python -m experiments.scheduler_cost`.

256 running requests of 128 pages each by default, all decoding; with --prefix_cache all of their
pages are of different content, and 4 a step are completed. Times `schedule` and `commit`, each
compiled once and called with donated state: on packed records, as the engine calls them, and on the
plain records of a script. Prints a table, then one JSON line; --record appends it to results/.
"""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import app, flags

from experiments import provenance
from jaxserve import sched
from jaxserve.config import CacheConfig, PlanShape, SchedulerConfig
from jaxserve.pytree import unpack
from jaxserve.sched import packing

FLAGS = flags.FLAGS
_REQUESTS = flags.DEFINE_integer("requests", 256, "Running requests.", lower_bound=1)
_PAGES = flags.DEFINE_integer("pages", 128, "Pages a request may hold.", lower_bound=2)
_QUEUE = flags.DEFINE_integer("queue", 256, "Slots of the waiting queue.", lower_bound=0)
_STEPS = flags.DEFINE_integer("steps", 400, "Timed steps.", lower_bound=10)
_ORDERING = flags.DEFINE_enum("ordering", "fcfs", ["fcfs", "priority"], "Order of service.")
_POLICIES = flags.DEFINE_list(
  "policies", ["vllm_v1"], "Policies to time; 'all' for every one in the table."
)
_PREFIX = flags.DEFINE_bool("prefix_cache", False, "Time every policy with a prefix cache too.")
_RECORD = flags.DEFINE_bool("record", False, "Append the result to results/.")


def make_config(policy: str = "vllm_v1", prefix_cache: bool = False) -> SchedulerConfig:
  page_size = 64
  cache = CacheConfig(num_pages=_REQUESTS.value * _PAGES.value, page_size=page_size)
  return SchedulerConfig(
    cache=cache,
    max_num_seqs=_REQUESTS.value,
    max_requests=_REQUESTS.value + _QUEUE.value,
    max_budget=8192,
    max_model_len=_PAGES.value * page_size,
    ordering=_ORDERING.value,
    policy=policy,
    prefix_cache=prefix_cache,
  )


@dataclasses.dataclass(frozen=True)
class Calls:
  """Compiled functions on one form of the records."""

  init: Callable
  submit: Callable
  schedule: Callable
  commit: Callable
  samples: Callable  # of a decision, bool[Q]
  params: object


def plain_calls(config):
  def commit(state, decision, stopped, *digests):
    return sched.commit(state, decision, stopped, **({"digests": digests[0]} if digests else {}))

  return Calls(
    init=lambda: sched.init(config),
    submit=jax.jit(sched.submit, donate_argnums=0),
    schedule=jax.jit(lambda s, p: sched.schedule(s, p, config), donate_argnums=0),
    commit=jax.jit(commit, donate_argnums=0),
    samples=lambda decision: np.asarray(decision.samples),
    params=jax.device_put(sched.make_params(config)),
  )


def packed_calls(config):
  like = packing.decision_like(config)
  return Calls(
    init=lambda: packing.pack_state(sched.init(config)),
    submit=jax.jit(functools.partial(packing.call, sched.submit, config=config), donate_argnums=0),
    schedule=jax.jit(lambda s, p: packing.schedule(s, p, config), donate_argnums=0),
    commit=jax.jit(functools.partial(packing.commit, config=config), donate_argnums=0),
    samples=lambda decision: unpack(np.asarray(decision), like).samples,
    params=jax.device_put(packing.pack_params(sched.make_params(config))),
  )


def timed(fn, *args):
  start = time.perf_counter()
  out = jax.block_until_ready(fn(*args))
  return out, time.perf_counter() - start


def measure(calls, config, steps):
  """Medians in microseconds of schedule, commit and both, once every request decodes."""
  state, none = calls.init(), np.zeros(config.max_requests, bool)
  half, page_size = config.max_model_len // 2, config.cache.page_size
  rng = np.random.default_rng(0)

  def digests(count):
    return rng.integers(1, 1 << 32, (count, 4), np.uint32)

  lengths = [half - number % page_size for number in range(config.max_num_seqs)]
  for length in lengths:
    extra = {}
    if config.prefix_cache:
      pages = np.int32(length // page_size)
      extra = {"digests": digests(config.pages_per_request), "num_digests": pages}
    state, _ = calls.submit(state, np.int32(length), np.int32(config.max_model_len), **extra)
  prefill_steps = -(-config.max_num_seqs * half // config.max_budget) + 2
  times, known = [], np.zeros(config.max_requests, int)
  known[: len(lengths)] = lengths
  for number in range(prefill_steps + steps):
    (state, decision), schedule_s = timed(calls.schedule, state, calls.params)
    extra = ()
    if config.prefix_cache:
      known += calls.samples(decision)
      extra = (digests(len(known)) * (known % page_size == 0)[:, None].astype(np.uint32),)
    (state, _), commit_s = timed(calls.commit, state, decision, none, *extra)
    if number >= prefill_steps:
      times.append((schedule_s, commit_s, schedule_s + commit_s))
  return [round(1e6 * statistics.median(column), 1) for column in zip(*times, strict=True)]


def measure_lay_out(config, steps):
  calls = plain_calls(config)
  state, _ = calls.submit(calls.init(), np.int32(1), np.int32(9))
  state, decision = calls.schedule(state, calls.params)
  shape = PlanShape.of(config, num_tokens=config.max_num_seqs)
  lay_out = jax.jit(lambda s, d: sched.lay_out(s, d, shape))
  times = [timed(lay_out, state, decision)[1] for _ in range(steps)]
  return round(1e6 * statistics.median(times), 1)


def measure_policy(policy, prefix_cache):
  config = make_config(policy, prefix_cache)
  result = {"policy": policy, "prefix_cache": prefix_cache}
  for name, calls in (("packed", packed_calls(config)), ("plain", plain_calls(config))):
    values = measure(calls, config, _STEPS.value)
    parts = ("schedule", "commit", "schedule+commit")
    result |= {f"{name}_{p}_us": v for p, v in zip(parts, values, strict=True)}
  return result | {
    "lay_out_us": measure_lay_out(config, _STEPS.value), "requests": _REQUESTS.value,
    "pages": _PAGES.value, "ordering": _ORDERING.value,
  }  # fmt: skip


def main(_):
  chosen = list(sched.POLICIES) if _POLICIES.value == ["all"] else _POLICIES.value
  for policy in chosen:
    for prefix_cache in (False, True) if _PREFIX.value else (False,):
      report(measure_policy(policy, prefix_cache))


def report(result):
  for key, value in result.items():
    print(f"{key:26} {value}")
  result |= provenance.collect()
  if _RECORD.value:
    provenance.append(__file__, result)
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
