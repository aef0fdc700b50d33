"""The prefix cache on a real engine: the same tokens with and without it, whatever is shared."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve import cache, sched
from jaxserve.engine import SamplingParams
from jaxserve.replay import recording
from jaxserve.replay.recorder import Recorder
from jaxserve.replay.replaying import replay
from jaxserve.sched import packing
from tests.testing.engines import SCHEDULER, tiny_engine

S = SCHEDULER.cache.page_size
CACHED = dataclasses.replace(SCHEDULER, prefix_cache=True, reserve="none")
NUM_PAGES = CACHED.cache.num_pages
TAKEN = 10  # pages that nobody gets in a tight pool: 13 are left, the longest request needs 12


def cached_engine(tight=False):
  """Idle, with an empty cache; tight: with pages that it believes held, for ever."""
  engine = tiny_engine(scheduler=CACHED)
  engine.reset_prefix_cache()
  if tight:
    state = packing.unpack_state(host(engine._planner._state), CACHED)
    pool = cache.allocate(jax.tree.map(jnp.asarray, state.pool), jnp.int32(TAKEN), TAKEN)[0]
    state = packing.pack_state(dataclasses.replace(state, pool=pool))
    engine._planner._state = jax.device_put(host(state), engine._planner._devices.scheduler)
  engine.set_params(sched.make_params(CACHED))
  engine.guard.count = 0  # what other engines compiled meanwhile is not this one's
  return engine


def host(tree):
  return jax.tree.map(np.asarray, tree)


def check_pages(engine, taken):
  """Every page is held as often as tables name it, and who is not held is free."""
  state = packing.unpack_state(host(engine._planner._state), CACHED)
  held = np.zeros(NUM_PAGES, int)
  held[:taken] = 1
  for table, count in zip(state.block_tables, state.num_pages, strict=True):
    np.add.at(held, table[:count], 1)
  np.testing.assert_array_equal(held, state.pool.refs)
  assert state.pool.num_free == np.sum(held == 0) == engine.num_free_pages


def run(engine, requests, budget, taken=0):
  """Submits as slots allow, steps until idle; tokens of every request."""
  engine.set_params(sched.make_params(engine.config.scheduler, budget=budget))
  waiting, ids, outputs = list(requests), [], {}
  while waiting or not engine.is_idle:
    while waiting and engine.num_requests < engine.config.scheduler.max_requests:
      prompt, sampling = waiting.pop(0)
      ids.append(engine.submit(prompt, sampling))
      outputs[ids[-1]] = []
    events = engine.step()
    for event in events.outputs if events else ():
      outputs.setdefault(event.request_id, []).append(event.token)
    if engine.config.scheduler.prefix_cache:
      check_pages(engine, taken)
  assert engine.num_free_pages == NUM_PAGES - taken
  assert engine.retraces == 0
  return [outputs[i] for i in ids]


@st.composite
def workloads(draw):
  """Prompts of three families, in parts the same; some continue an earlier one."""
  rng = np.random.default_rng(draw(st.integers(0, 2**31)))
  bases = rng.integers(0, 61, (3, 40))
  requests = []
  for _ in range(draw(st.integers(4, 12))):
    shared, own = int(rng.integers(0, 36)), int(rng.integers(0, 9))
    prompt = [*bases[rng.integers(0, 3)][:shared], *rng.integers(0, 61, max(own, 1 - shared))]
    if requests and rng.random() < 0.3:
      prompt = requests[rng.integers(0, len(requests))][0]
    sampling = SamplingParams(
      max_tokens=int(rng.integers(1, 15)), temperature=float(rng.choice([0.0, 1.0])),
      seed=int(rng.integers(0, 99)), reads_prefix_cache=bool(rng.random() < 0.9),
      cache_salt=str(rng.integers(0, 2)) if rng.random() < 0.2 else None,
    )  # fmt: skip
    requests.append(([int(t) for t in prompt], sampling))
  return requests, int(rng.integers(5, 62))


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_tokens_are_the_same_without_a_cache_with_one_and_under_constant_eviction(workload):
  plain = tiny_engine()
  plain.guard.count = 0
  expected = run(plain, *workload)
  for taken in (0, TAKEN):
    engine = cached_engine(tight=taken > 0)
    assert run(engine, *workload, taken) == expected
    assert run(engine, *workload, taken) == expected, "with what the first round left behind"


def test_requests_preempted_in_a_tight_pool_resume_from_their_own_pages():
  engine = cached_engine(tight=True)
  before = engine.prefix_stats
  rng = np.random.default_rng(5)
  requests = [
    (rng.integers(0, 61, 14).tolist(), SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(4)
  ]
  plain = tiny_engine()
  plain.guard.count = 0
  assert run(engine, requests, 61, TAKEN) == run(plain, requests, 61)
  stats = engine.prefix_stats
  assert stats.resumed_queried > before.resumed_queried
  assert stats.resumed_hit > before.resumed_hit
  assert stats.evicted > before.evicted
  assert stats.hit == before.hit, "nothing is shared, so nothing counts as found"


def test_the_second_turn_of_a_chat_computes_only_what_is_new():
  engine = cached_engine()
  prompt = np.random.default_rng(1).integers(0, 61, 17).tolist()
  (first,) = engine.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
  assert first.cached_tokens == 0
  again = [*prompt, *first.tokens, 7, 8, 9]
  (second,) = engine.generate([again], SamplingParams(max_tokens=3))
  # The KV of the last output was never computed, so the page that it would complete is not there.
  assert second.cached_tokens == (17 + 12 - 1) // S * S == 25
  assert (engine.prefix_stats.queried, engine.prefix_stats.hit) >= (17 + 32, 25)


def test_an_aligned_prompt_cached_whole_computes_one_token_and_writes_no_shared_page():
  engine = cached_engine()
  prompt = np.random.default_rng(2).integers(0, 61, 6 * S).tolist()
  once = engine.generate([prompt], SamplingParams(max_tokens=1))
  before = host(engine._runner._state.kv)
  engine.submit(prompt, SamplingParams(max_tokens=1))
  events = engine.step()
  assert [(part.tokens, part.cached) for part in events.scheduled] == [(1, 6 * S - 1)]
  assert events.outputs[0].token == once[0].tokens[0]
  chex.assert_trees_all_equal(before, host(engine._runner._state.kv))


def test_twins_of_one_step_share_what_the_first_of_them_computes():
  engine = cached_engine()
  prompt = np.random.default_rng(3).integers(0, 61, 28).tolist()
  for _ in range(2):
    engine.submit(prompt, SamplingParams(max_tokens=2))
  events = engine.step()
  assert [part.tokens for part in events.scheduled] == [28, 3]
  assert events.outputs[0].token == events.outputs[1].token
  run(engine, [], 61)


def test_salts_do_not_share_and_a_reader_of_its_whole_prompt_is_still_shared_from():
  engine = cached_engine()
  prompt = np.random.default_rng(4).integers(0, 61, 21).tolist()

  def cached(**options):
    return engine.generate([prompt], SamplingParams(max_tokens=1, **options))[0].cached_tokens

  assert cached(reads_prefix_cache=False) == 0
  assert cached(reads_prefix_cache=False) == 0
  assert cached() == 20
  assert cached(cache_salt="a") == 0
  assert cached(cache_salt="b") == 0
  assert cached(cache_salt="a") == 20
  engine.reset_prefix_cache(b"another run")
  assert cached() == 0
  assert cached() == 20
  engine.reset_prefix_cache()
  assert cached() == 0


def test_the_cache_is_not_reset_under_requests():
  engine = cached_engine()
  engine.submit([1, 2, 3])
  with pytest.raises(RuntimeError, match="reset the cache before"):
    engine.reset_prefix_cache()
  run(engine, [], 61)


def test_a_recorded_run_with_hits_is_executed_again_bit_by_bit():
  engine, events = cached_engine(), []
  recorder = Recorder(engine, "tiny", events.append, "5a" * 16)
  rng = np.random.default_rng(6)
  base = rng.integers(0, 61, 25).tolist()
  with recorder.run("shared", "vllm_v1"):
    for number in range(6):
      recorder.submit(f"r{number}", [*base, *rng.integers(0, 61, number)])
      engine.step()
    while not engine.is_idle:
      engine.step()
  assert engine.salt == b"\x5a" * 16
  record = recording.parse("".join(recording.to_line(event) for event in events))
  steps = record.runs[0].steps
  assert sum(part.cached for step in steps for part in step.requests) > 3 * 20
  engine.reset_prefix_cache(b"other")
  assert replay(record, engine) is None
