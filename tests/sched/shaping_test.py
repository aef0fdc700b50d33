"""Steps as long as a latency target allows, and as wide as a bucket."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxserve import cost, sched
from jaxserve.config import token_buckets
from jaxserve.engine.config import bucket_for
from tests.sched.life_test import drain, random_life
from tests.testing import oracle
from tests.testing.own_policy_oracles import random_args
from tests.testing.scheduling import compiled, small_config

OURS = ["slo_aware", "bucket_shaped"]
PROMPT, CONTEXT = 30000, 2048


def config_for(policy, **fields):
  return small_config(
    policy=policy, page_size=64, num_pages=2000, max_num_seqs=64, max_requests=64,
    max_budget=2048, max_model_len=32768, **fields,
  )  # fmt: skip


@functools.cache
def life_of(policy, steps):
  """The jitted life of `steps` steps: (state, params) -> see `scanned`."""
  config = config_for(policy)
  return jax.jit(lambda state, params: scanned(config, state, params, steps))


def beside_decodes(rows, prompts, **args):
  """(tokens, start) of 100 steps of slo_aware; `rows` requests decode at CONTEXT tokens."""
  config = config_for("slo_aware")
  params = sched.make_params(config, policy=args)
  return map(np.asarray, life_of("slo_aware", 100)(loaded(config, prompts, rows), params))


def loaded(config, prompts, rows):
  """A state in which `rows` decode, without the steps that led there; prompts wait."""
  state, submit = sched.init(config), compiled(config)[1]
  for n in [CONTEXT] * rows + prompts:
    state, _ = submit(state, jnp.int32(n), jnp.int32(n + 400))
  decoding = jnp.arange(64) < rows
  pages = CONTEXT // 64
  own = np.arange(64)[:, None] * pages + np.arange(state.block_tables.shape[1])
  pool = dataclasses.replace(
    state.pool,
    free_pages=jnp.roll(jnp.arange(2000), -rows * pages),
    num_free=jnp.int32(2000 - rows * pages),
  )
  return dataclasses.replace(
    state,
    status=jnp.where(decoding, 2, state.status),
    num_computed=jnp.where(decoding, CONTEXT, 0),
    num_known=state.num_known + decoding.astype(jnp.int32),
    num_pages=jnp.where(decoding, pages, 0),
    block_tables=jnp.where(decoding[:, None], own, state.block_tables).astype(jnp.int32),
    pool=pool,
  )


def scanned(config, state, params, steps):
  """(tokens i32[steps, Q], start i32[steps, Q]) of a life."""

  def step(state, _):
    state, decision = sched.schedule(state, params, config)
    state, _ = sched.commit(state, decision, jnp.zeros(config.max_requests, bool))
    return state, (decision.tokens, decision.start)

  return lax.scan(step, state, None, length=steps)[1]


def predicted_ms(tokens, start, rows):
  """By `cost.chunk_seconds`, in double precision: rows decode, one more request has a chunk."""
  chunk, prefix, resident = int(tokens[rows]), int(start[rows]), int(start[:rows].sum())
  return 1e3 * cost.chunk_seconds(
    cost.LLAMA3_8B, cost.H100, chunk, prefix, rows=rows, resident=resident
  )


def test_the_chunk_shrinks_as_its_prefix_grows_and_every_step_fills_the_target():
  tokens, start = beside_decodes(32, [PROMPT], itl_target_ms=45.0)
  chunks = [int(t[32]) for t in tokens if t[32] > 1]
  assert sum(chunks) == PROMPT and chunks[0] > 1.9 * chunks[-2]
  assert chunks[:-1] == sorted(chunks[:-1], reverse=True) and chunks[0] < 2048 - 32
  for t, s in zip(tokens[: len(chunks) - 1], start, strict=False):
    assert predicted_ms(t, s, 32) <= 45.0 * (1 + 1e-6)
    one_more = np.where(np.arange(64) == 32, t + 1, t)
    assert predicted_ms(one_more, s, 32) > 45.0 * (1 - 1e-6)
    assert (t[:32] == 1).all()


def test_decodes_are_never_held_back_and_a_prompt_waits_for_them():
  tokens, _ = beside_decodes(32, [PROMPT], itl_target_ms=3.0)
  assert (tokens[:, :32] == 1).all() and not tokens[:, 32:].any()


def test_a_lone_prompt_gets_the_minimum_whatever_the_target():
  tokens, _ = beside_decodes(0, [1000], itl_target_ms=0.5, min_chunk=48)
  assert [int(t.sum()) for t in tokens] == [48] * 20 + [40] + [1] * 79


def test_nobody_overtakes_a_prompt_that_was_cut():
  tokens, start = beside_decodes(16, [20000, 100, 100], itl_target_ms=20.0)
  assert 16 in np.flatnonzero(tokens[0]) and (tokens[0, 17:] == 0).all()
  first = int(np.flatnonzero(tokens[:, 17])[0])
  assert start[first, 16] + tokens[first, 16] >= 20000


def test_targets_under_vmap_equal_separate_runs():
  config = config_for("slo_aware")
  state = loaded(config, [6000, 4000, 900], 8)
  params = jax.tree.map(jnp.asarray, sched.make_params(config))

  def life(target):
    swept = dataclasses.replace(params, policy=params.policy | {"itl_target_ms": target})
    return scanned(config, state, swept, 20)

  targets = jnp.linspace(5.0, 80.0, 11)
  together, alone = jax.jit(jax.vmap(life))(targets), jax.jit(life)
  for i, target in enumerate(targets):
    chex.assert_trees_all_equal(jax.tree.map(lambda x, i=i: x[i], together), alone(target))
  most = np.asarray(together[0]).sum(axis=2).max(axis=1)
  assert (np.diff(most) >= 0).all() and len(set(most)) > 5


CONFIGS = {
  "tight": {},
  "gate": {"reserve": "gate", "num_pages": 23, "max_budget": 31},
  "priority": {"ordering": "priority", "reserve": "none"},
}


@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize("name", CONFIGS)
def test_random_lives_under_every_parameter_equal_the_loop(policy, name):
  config = small_config(policy=policy, **CONFIGS[name])
  rng = np.random.default_rng(len(name))
  for _ in range(4):
    chunked = bool(rng.random() < 0.75)
    params = oracle.Params(
      budget=int(rng.integers(5, config.max_budget + 1)) if chunked else config.max_budget,
      max_num_seqs=int(rng.integers(1, 6)),
      threshold=int(rng.choice([0, 0, 2, 5])),
      cap_when_alone=bool(rng.random() < 0.5),
      chunked=chunked,
      watermark_pages=int(rng.integers(0, 2)),
      policy=random_args(policy, rng),
    )
    most = 30 if chunked else 8
    drain(random_life(rng, config, params, steps=80, most_prompt=most), params)


@pytest.mark.slow
@pytest.mark.parametrize("policy", OURS)
def test_many_random_lives_under_every_parameter_equal_the_loop(policy):
  for seed, name in itertools.product(range(20), CONFIGS):
    config = small_config(policy=policy, **CONFIGS[name])
    rng = np.random.default_rng(seed)
    params = oracle.Params(
      budget=int(rng.integers(5, config.max_budget + 1)), max_num_seqs=int(rng.integers(1, 6)),
      threshold=int(rng.choice([0, 2, 5])), policy=random_args(policy, rng),
    )  # fmt: skip
    drain(random_life(rng, config, params, steps=500), params)


@functools.cache
def load_of(policy):
  """(params, events) -> tokens of each step, jitted; events are (prompt, output, whether)."""
  config = small_config(
    policy=policy, page_size=16, num_pages=4000, max_num_seqs=64, max_requests=128,
    max_budget=1024, max_model_len=1024,
  )  # fmt: skip

  def step(params, state, event):
    prompt, output, here = event
    new, _ = sched.submit(state, prompt, prompt + output)
    state = jax.tree.map(lambda a, b: jnp.where(here, a, b), new, state)
    state, decision = sched.schedule(state, params, config)
    state, _ = sched.commit(state, decision, jnp.zeros(config.max_requests, bool))
    return state, decision.num_tokens

  def life(params, events):
    return lax.scan(functools.partial(step, params), sched.init(config), events)[1]

  return config, jax.jit(life)


def short_prompts(policy, budget, **args):
  """Tokens of each step while prompts of 20 to 300 tokens come and go, one every other step."""
  rng, steps = np.random.default_rng(5), 400
  prompts, outputs = rng.integers(20, 300, steps), rng.integers(10, 60, steps)
  events = jnp.asarray(prompts, jnp.int32), jnp.asarray(outputs, jnp.int32)
  config, life = load_of(policy)
  params = sched.make_params(config, budget=budget, policy=args)
  return np.asarray(life(params, (*events, jnp.asarray(rng.random(steps) < 0.5))))


def padding(tokens, budget):
  """The fraction of computed tokens that are padding, where every step runs in its bucket."""
  buckets = tuple(sorted({*token_buckets(1024), budget}))
  computed = sum(bucket_for(int(t), buckets) for t in tokens if t)
  return 1 - tokens.sum() / computed


@pytest.mark.parametrize("budget", [300, 1024])
def test_bucket_shaped_computes_less_padding(budget):
  plain, shaped = short_prompts("vllm_v1", budget), short_prompts("bucket_shaped", budget)
  assert shaped.max() <= budget and abs(int(plain.sum()) - int(shaped.sum())) < 2 * budget
  assert padding(shaped, budget) < 0.75 * padding(plain, budget)
  lenient = short_prompts("bucket_shaped", budget, max_padding=0.2)
  assert padding(shaped, budget) < padding(lenient, budget) < padding(plain, budget)
  np.testing.assert_array_equal(short_prompts("bucket_shaped", budget, max_padding=1.0), plain)


def first_step(prompts, rows, **args):
  """Tokens of the prompts in the step in which they arrive beside decodes."""
  config = config_for("bucket_shaped")
  params = sched.make_params(config, policy=args)
  state, decision = compiled(config)[0](loaded(config, prompts, rows), params)
  tokens = np.asarray(decision.tokens)
  assert (tokens[:rows] == 1).all()
  held = np.asarray(state.num_pages)[rows : rows + len(prompts)]
  given = tokens[rows : rows + len(prompts)]
  assert (held == -(-given // 64)).all() and state.pool.num_free == 2000 - 33 * rows - held.sum()
  return list(given)


def test_the_newest_chunks_lose_what_is_above_the_bucket():
  assert first_step([100], 8) == [88]  # 96 of 108: the bucket of 128 would be a sixth empty
  assert first_step([118], 8) == [118]  # 126 of 128
  assert first_step([60, 30, 10], 8) == [60, 28, 0]
  assert first_step([60, 30, 10], 8, max_padding=0.2) == [60, 30, 10]


def test_a_trim_leaves_decodes_and_a_prompt_token():
  assert first_step([4], 40) == [4]  # 32 would not hold the decodes
  assert first_step([10], 60) == [4]  # 64 holds them and four tokens more
  assert first_step([11, 5], 60) == [4, 0]
  assert first_step([4], 0) == [4] and first_step([5], 0) == [4]
