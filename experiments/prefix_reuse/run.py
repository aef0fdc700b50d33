"""Requests in order of arrival, one at a time, through the scheduler with a prefix cache.

No time passes and nothing is computed: which pages a request finds depends on the order alone, as
long as nobody waits for anybody.
"""

import functools
import time

import jax
import numpy as np

from experiments.prefix_reuse import live
from experiments.store import workload_digest
from jaxserve import cache, sched, workload
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.engine import devices
from jaxserve.pytree import unpack
from jaxserve.sched import packing

VOCABULARY = 1 << 15


def run(config, store):
  rows = []
  devices.set_up()  # before anything is computed
  if config.trace:
    load = workload.read(config.trace)
    if not load.blocks:
      raise ValueError(f"trace={config.trace}: says nothing of its text; give one of Mooncake")
    fixed = {"load": workload_digest(load), "page_size": config.page_size}
    settings = [{"pool": pages} for pages in config.pools]
    rows += store.measure("Trace", fixed, settings, lambda s: measure(config, load, s["pool"]))
  if config.model:
    rows += live.run(config, store)
  return rows


def pages_of(load, page_size):
  """Pages of every request, its outputs left out."""
  return -(-load.num_prompt // page_size)


def measure(config, load, pool):
  """Hit rate in tokens; and what the scheduler took for it."""
  size = config.page_size
  needed = int(pages_of(load, size).max()) + 1
  total = int(pages_of(load, size).sum())
  if pool and pool < needed:
    raise ValueError(f"pools={pool}: the longest request needs {needed} pages of {size} tokens")
  scheduler = SchedulerConfig(
    cache=CacheConfig(num_pages=pool or total, page_size=size), max_num_seqs=1, max_requests=1,
    max_budget=needed * size, max_model_len=needed * size, prefix_cache=True,
  )  # fmt: skip
  begin = time.perf_counter()
  queried, hit, evicted = serve(load, scheduler)
  return {
    "pages": pool or total,
    "unlimited": not pool,
    "requests": len(load),
    "queried_tokens": queried,
    "hit_tokens": hit,
    "hit_rate": round(hit / queried, 5),
    "evictions": evicted,
    "us_per_request": round(1e6 * (time.perf_counter() - begin) / len(load)),
  }


def serve(load, scheduler):
  """(tokens asked for, tokens found, pages evicted), each request with one output."""
  call = functools.partial(packing.call, config=scheduler)
  submit = jax.jit(functools.partial(call, sched.submit), donate_argnums=0)
  step = jax.jit(lambda s, p: packing.schedule(s, p, scheduler), donate_argnums=0)
  commit = jax.jit(functools.partial(packing.commit, config=scheduler), donate_argnums=0)
  params = packing.pack_params(sched.make_params(scheduler))
  like, root = packing.decision_like(scheduler), cache.root_digest(b"")
  state, none = packing.pack_state(sched.init(scheduler)), np.zeros(1, bool)
  queried = hit = evicted = 0
  for index in range(len(load)):
    prompt = load.prompt(index, VOCABULARY)
    chain = cache.PageChain(prompt.tolist(), scheduler.cache.page_size, root)
    digests = np.zeros((scheduler.pages_per_request, 4), np.uint32)
    digests[: chain.num_pages] = chain.prompt_digests
    state, _ = submit(
      state, np.int32(len(prompt)), np.int32(len(prompt) + 1), digests=digests,
      num_digests=np.int32(chain.num_pages),
    )  # fmt: skip
    state, packed = step(state, params)
    decision = unpack(np.asarray(packed), like)
    state, finished = commit(state, packed, none)
    assert finished[0], "a budget of the longest prompt serves any prompt in one step"
    queried, hit = queried + len(prompt), hit + int(decision.cached[0])
    evicted += int(decision.evicted)
  return queried, hit, evicted
