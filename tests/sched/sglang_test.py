"""SGLang's policy: its memory against the loop's, lives that retract much, the order of victims."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import sched
from tests.sched import life_test
from tests.testing import oracle
from tests.testing.scheduling import Twins, small_config
from tests.testing.sglang_oracle import random_arguments

pytestmark = pytest.mark.one_leg

POLICIES = ("sglang", "sglang_mixed")
# Outputs are hardly reserved, so that many retractions follow.
CARELESS = {"clip_max_new_tokens": 1, "page_overhead": 0}


class SGLangTwins(Twins):
  """Compares what the policy remembers, too, and counts what happened."""

  def __init__(self, config):
    super().__init__(config)
    self.seen = collections.Counter()

  def schedule(self, params):
    decision, step = super().schedule(params)
    memory, loop = self.state.policy, self.oracle
    nobody = self.config.max_requests
    chunked = nobody if loop.chunked is None else loop.chunked.slot
    assert int(memory.chunked) == chunked
    assert bool(memory.batch_is_full) == loop.full
    assert (int(memory.ratio), int(memory.countdown)) == (loop.ratio, loop.countdown)
    decoders = [r.slot for r in loop.batch if loop.alive(r)]
    assert sorted(np.flatnonzero(memory.role == 1)) == sorted(decoders)
    assert int(memory.ghosts) == len(loop.batch) - len(decoders)
    self.seen += collections.Counter(
      retracted=len(step.preempted), chunked=chunked < nobody, full=loop.full,
      ghosts=int(memory.ghosts), idle=not step.tokens and bool(loop.requests),
      last_one=bool(step.preempted) and not step.tokens,
    )  # fmt: skip
    return decision, step


def lives(policy, rng, count, steps, monkeypatch):
  monkeypatch.setattr(life_test, "Twins", SGLangTwins)
  seen = collections.Counter()
  for _ in range(count):
    chunked = bool(rng.random() < 0.8)
    params = oracle.Params(
      budget=int(rng.integers(5, 18)) if chunked else 17,
      max_num_seqs=int(rng.integers(2, 6)), watermark_pages=int(rng.integers(0, 2)),
      chunked=chunked, policy=random_arguments(rng) | (CARELESS if rng.random() < 0.7 else {}),
    )  # fmt: skip
    # Without chunks, a resumed request may not exceed the budget too often.
    prompt = int(rng.choice([6, 28])) if chunked else 9
    config = small_config(policy=policy, num_pages=int(rng.choice([11, 13])))
    twins = life_test.random_life(rng, config, params, steps, prompt, most_outputs=25)
    life_test.drain(twins, params)
    seen += twins.seen
  return seen


@pytest.mark.parametrize("policy", POLICIES)
def test_lives_that_retract_much_equal_the_loop_and_remember_the_same(policy, monkeypatch):
  seen = lives(policy, np.random.default_rng(1), 5, 200, monkeypatch)
  often = {"retracted", "chunked", "full", "idle"} | ({"ghosts"} if policy == "sglang" else set())
  assert all(seen[name] > 5 for name in often), seen


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_many_lives_that_retract_much(policy, monkeypatch):
  seen = lives(policy, np.random.default_rng(2), 100, 1000, monkeypatch)
  assert seen["last_one"] > 0, seen


def test_victims_go_to_the_tail_of_the_queue_latest_first():
  config = small_config(policy="sglang", num_pages=6)
  careless = CARELESS | {"clip_max_new_tokens": 0}
  twins, params = Twins(config), oracle.Params(budget=17, max_num_seqs=5, policy=careless)
  for _ in range(5):
    twins.submit(3, 12)
  twins.submit(2, 9)
  twins.schedule(params)
  twins.commit()
  # Every row needs a page and one is free: two victims leave three pages for three rows.
  decision, _ = twins.schedule(params)
  assert list(np.flatnonzero(decision.preempted)) == [3, 4]
  assert list(twins.state.queue) == [0, 1, 2, 5, 4, 3, 7]


def chunks_of_one_prompt(num_prompt, steps, budget, **arguments):
  config = small_config(policy="sglang", page_size=4, num_pages=71, max_budget=budget)
  params = sched.make_params(config, policy=arguments)
  state, _ = sched.submit(sched.init(config), jnp.int32(num_prompt), jnp.int32(31))
  tokens = []
  for _ in range(steps):
    state, decision = sched.schedule(state, params, config)
    tokens.append(int(decision.num_tokens))
  return tokens


@pytest.mark.parametrize(
  ("num_prompt", "budget", "arguments", "tokens"),
  [
    (22, 10, {}, [8, 10, 4, 1]),  # only a first chunk is cut to pages
    (22, 17, {"chunked_prefill_size": 8}, [8, 8, 6, 1]),
    (22, 17, {"chunked_prefill_size": 3}, [3] * 7 + [1]),  # below one page: not cut
    (22, 30, {"chunked_prefill_size": -1}, [22, 1]),
    (22, 10, {"prefill_decode_interval": 2}, [8, 0, 0, 10, 0, 0, 4, 1, 1]),
  ],
)
def test_chunks_of_a_lone_prompt(num_prompt, budget, arguments, tokens):
  assert chunks_of_one_prompt(num_prompt, len(tokens), budget, **arguments) == tokens


def test_a_prompt_above_the_budget_is_refused_where_chunks_are_off():
  config = small_config(policy="sglang")
  params = sched.make_params(config, policy={"chunked_prefill_size": -1})
  with pytest.raises(ValueError, match="prompt: 18 tokens exceed budget=17"):
    sched.check_request(config, params, 18, 4)


def test_hyper_parameters_can_be_vmapped():
  config = small_config(policy="sglang", page_size=4, num_pages=71)
  params = jax.tree.map(jnp.asarray, sched.make_params(config))
  state, _ = sched.submit(sched.init(config), jnp.int32(20), jnp.int32(31))

  def first(size):
    own = params.__class__(
      **(vars(params) | {"policy": params.policy | {"chunked_prefill_size": size}})
    )
    return sched.schedule(state, own, config)[1].num_tokens

  sizes = jnp.asarray([-1.0, 3.0, 4.0, 9.0, 1000.0])
  np.testing.assert_array_equal(jax.vmap(first)(sizes), [17, 3, 4, 8, 16])
