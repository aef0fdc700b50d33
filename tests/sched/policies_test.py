"""Every policy: against its loop, over whole lives; under jit, vmap and scan; worked examples."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxserve import sched
from jaxserve.sched import packing
from jaxserve.sched.rules import admit, cap_by_threshold, fit_pages, running, serve
from jaxserve.types import Status
from tests.sched.life_test import drain, random_life
from tests.testing import oracle
from tests.testing.own_policy_oracles import random_args as own_arguments
from tests.testing.policy_oracles import ORACLES
from tests.testing.scheduling import Twins, check_pages, compiled, host, small_config
from tests.testing.sglang_oracle import random_arguments as sglang_arguments

POLICIES = sorted(sched.POLICIES)


def random_args(policy, rng):
  """Hyper-parameters that matter in lives of a few tokens."""
  return sglang_arguments(rng) if policy.startswith("sglang") else own_arguments(policy, rng)


def config_for(policy, **overrides):
  """A pool tight enough to preempt; budgets that can hold a whole prompt where one must fit."""
  whole = sched.POLICIES[policy].whole_prompts
  return small_config(policy=policy, **({"max_budget": 31 if whole else 17} | overrides))


def live_and_drain(rng, config, steps):
  whole = sched.POLICIES[config.policy].whole_prompts
  params = oracle.Params(
    budget=config.max_budget if whole else int(rng.integers(5, config.max_budget + 1)),
    max_num_seqs=int(rng.integers(1, 6)),
    watermark_pages=int(rng.integers(0, 2)),
    policy=random_args(config.policy, rng),
  )
  drain(random_life(rng, config, params, steps, most_prompt=28), params)


def test_every_policy_has_a_loop_to_compare_with_and_a_source():
  assert set(ORACLES) == set(sched.POLICIES)
  assert all(p.formula and p.source and p.words for p in sched.POLICIES.values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_pages", [13, 71])
def test_random_lives_equal_the_loop_and_drain(policy, num_pages):
  rng = np.random.default_rng(len(policy))
  for _ in range(4):
    live_and_drain(rng, config_for(policy, num_pages=num_pages), steps=150)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_two_hundred_thousand_steps_equal_the_loop(policy):
  rng = np.random.default_rng(3)
  for _ in range(200):
    live_and_drain(rng, config_for(policy), steps=1000)


@pytest.mark.parametrize("policy", ["sarathi", "sarathi_dynamic", "simple_chunking"])
def test_a_request_that_fills_the_pool_does_not_evict_itself_for_ever(policy):
  """The last token of its prompt was a decode that found no page free, and needed none."""
  twins = Twins(config_for(policy, num_pages=3))
  twins.submit(9, 10)
  drain(twins, oracle.Params(budget=4, max_num_seqs=4), most=8)


@pytest.mark.parametrize(
  ("policy", "chunked"), [("prefill_first", True), ("vllm_v1", False), ("sarathi", False)]
)
def test_a_preempted_request_that_has_grown_above_the_budget_is_served(policy, chunked):
  """It waited for a step that holds it whole, which there is none."""
  twins = Twins(config_for(policy, num_pages=4))
  params = oracle.Params(budget=5, max_num_seqs=5, chunked=chunked)
  for _ in range(2):
    twins.submit(3, 12)
  drain(twins, params, most=40)
  assert twins.state.num_preemptions.max() > 0


def lives(config, params, steps):
  """A scan over steps from five submitted requests; what each step decided."""

  def step(state, _):
    state, decision = sched.schedule(state, params, config)
    state, finished = sched.commit(state, decision, jnp.zeros(config.max_requests, bool))
    return state, (decision, finished)

  state = sched.init(config)
  for num_prompt, total in zip([7, 9, 3, 12, 5], [19, 31, 28, 23, 30], strict=True):
    state, _ = sched.submit(state, jnp.int32(num_prompt), jnp.int32(total))
  return lax.scan(step, state, None, length=steps)


@pytest.mark.parametrize("policy", POLICIES)
def test_vmap_over_budgets_equals_separate_scans(policy):
  config = config_for(policy)
  params = jax.tree.map(jnp.asarray, sched.make_params(config))
  budgets = jnp.arange(config.max_budget - 6, config.max_budget + 1, dtype=jnp.int32)
  life = jax.jit(lambda b: lives(config, dataclasses.replace(params, budget=b), 25))
  together = jax.jit(jax.vmap(life))(budgets)
  for i, budget in enumerate(budgets):
    alone = life(budget)
    jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b), together, alone)
  assert np.asarray(together[1][1]).any(), "somebody should finish"


@pytest.mark.parametrize("policy", POLICIES)
def test_packed_records_keep_memory_and_hyper_parameters(policy):
  config = config_for(policy)
  params = sched.make_params(config)
  schedule, submit, *_ = compiled(config)
  schedule_packed = jax.jit(lambda state, params: packing.schedule(state, params, config))
  state = sched.init(config)
  for n in (7, 9):
    state, _ = submit(state, np.int32(n), np.int32(20))
  packed = packing.pack_state(state)
  for _ in range(4):
    state, decision = schedule(state, params)
    packed, flat = schedule_packed(packed, jnp.asarray(packing.pack_params(params)))
    got = packing.unpack_state(packed, config)
    jax.tree.map(np.testing.assert_array_equal, got, state)
    np.testing.assert_array_equal(flat, packing.pack(decision))


class Load:
  """32 decoders, then two prompts of 5,000 tokens at once: the load of many comparisons."""

  def __init__(self, policy, budget, arguments=None):
    self.config = small_config(
      policy=policy, page_size=16, num_pages=20000, max_num_seqs=64, max_requests=64,
      max_budget=16384, max_model_len=8192,
    )  # fmt: skip
    self.params = sched.make_params(self.config, budget=16384, policy=arguments)
    self.state = sched.init(self.config)
    self.schedule = jax.jit(lambda s, p: sched.schedule(s, p, self.config))
    for _ in range(32):
      self.submit(16, 40)
    self.step()
    self.params = sched.make_params(self.config, budget=budget, policy=arguments)

  def submit(self, num_prompt, max_tokens):
    self.state, slot = sched.submit(
      self.state, jnp.int32(num_prompt), jnp.int32(num_prompt + max_tokens)
    )
    return int(slot)

  def step(self):
    """(tokens of each prompt, decodes) of one step."""
    self.state, decision = self.schedule(self.state, self.params)
    none = jnp.zeros(self.config.max_requests, bool)
    self.state, _ = sched.commit(self.state, decision, none)
    tokens = np.asarray(decision.tokens)
    return *(int(t) for t in tokens[32:34]), int(tokens[:32].sum())


EXPECTED = {
  "sarathi": [(2016, 0, 32), (2016, 0, 32), (968, 1048, 32), (1, 2015, 32), (1, 1937, 32)],
  "vllm_v1": [(2016, 0, 32), (2016, 0, 32), (968, 1048, 32), (1, 2015, 32), (1, 1937, 32)],
  "prefill_first": [(5000, 5000, 0), (1, 1, 32)],
  "orca": [(5000, 5000, 32), (1, 1, 32)],
  "static": [(0, 0, 32)] * 4,
  "simple_chunking": [
    (2048, 0, 0), (0, 0, 32), (2048, 0, 0), (0, 0, 32), (904, 0, 0), (1, 0, 32), (0, 2048, 0),
  ],
}  # fmt: skip


@pytest.mark.parametrize("policy", EXPECTED)
def test_two_long_prompts_beside_32_decoders(policy):
  budget = 16384 if sched.POLICIES[policy].whole_prompts else 2048
  load = Load(policy, budget)
  if policy == "simple_chunking":  # its first turn was the decoders' prompts
    assert load.step() == (0, 0, 32)
  for _ in range(2):
    load.submit(5000, 4)
  assert [load.step() for _ in EXPECTED[policy]] == EXPECTED[policy]


MIXED = [
  (2016, 0, 32), (2016, 0, 32), (968, 1040, 32), (1, 2015, 32), (1, 1945, 32), (1, 1, 32),
]  # fmt: skip
SGLANG_EXPECTED = [
  ("sglang", 2048, {},
   [(2048, 0, 0), (2048, 0, 0), (904, 1136, 0), (0, 2048, 0), (0, 1816, 0), (1, 1, 32)]),
  # The decoders' own prefill has started the interval.
  ("sglang", 2048, {"prefill_decode_interval": 1},
   [(0, 0, 32), (2048, 0, 0), (0, 0, 32), (2048, 0, 0), (0, 0, 32), (904, 1136, 0), (1, 0, 32),
    (0, 2048, 0), (1, 0, 32), (0, 1816, 0), (1, 1, 32)]),
  ("sglang_mixed", 2048, {}, MIXED),
  ("sglang_mixed", 16384, {"chunked_prefill_size": 2048}, MIXED),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "budget", "arguments", "expected"), SGLANG_EXPECTED)
def test_two_long_prompts_beside_32_decoders_under_sglang(policy, budget, arguments, expected):
  load = Load(policy, budget, arguments)
  for _ in range(2):
    load.submit(5000, 4)
  assert [load.step() for _ in expected] == expected


def test_dynamic_chunks_fall_with_the_prefix():
  config = small_config(
    policy="sarathi_dynamic", page_size=16, num_pages=600, max_budget=4096, max_model_len=8400
  )
  state, _ = sched.submit(sched.init(config), jnp.int32(8192), jnp.int32(8194))
  chunks = []
  while not chunks or sum(chunks) < 8192:
    state, decision = sched.schedule(state, sched.make_params(config), config)
    chunks.append(int(decision.num_tokens))
  assert chunks[:3] == [2048, 1536, 1536] and set(chunks[3:-1]) <= {1024, 512}


def test_a_policy_of_ones_own_is_a_rule():
  shy = sched.Policy(
    rule=sched.chain(cap_by_threshold(), serve(running), fit_pages(), admit(only_if_idle=True)),
    formula="as vllm_v1, but one batch after the other", source="this test",
  )  # fmt: skip
  config = small_config(policy=shy, num_pages=71)
  state, params = sched.init(config), sched.make_params(config)
  state, _ = sched.submit(state, jnp.int32(4), jnp.int32(9))
  state, first = sched.schedule(state, params, config)
  state, _ = sched.submit(state, jnp.int32(4), jnp.int32(9))
  state, second = sched.schedule(state, params, config)
  assert int(first.admitted.sum()) == 1 and not bool(second.admitted.any())
  assert int((state.status == Status.WAITING).sum()) == 1


def test_a_policy_of_ones_own_may_allot_more_pages_than_a_step_has_tokens():
  whole = sched.Policy(
    rule=sched.chain(serve(running), admit(pages="prompt")), formula="", source="this test"
  )
  config = small_config(policy=whole, num_pages=71, max_budget=5, max_model_len=61)
  state, params = sched.init(config), sched.make_params(config)
  state, _ = sched.submit(state, jnp.int32(59), jnp.int32(61))
  for _ in range(3):
    state, _ = sched.schedule(state, params, config)
    assert int(state.num_pages.max()) == 20
    check_pages(config, host(state))


def test_unknown_names_list_what_exists():
  with pytest.raises(ValueError, match=r"policy='fifo': is unknown; there are vllm_v1, sarathi"):
    sched.init(small_config(policy="fifo"))
  with pytest.raises(ValueError, match=r"policy_args='lo': sarathi_dynamic does not take it.*low"):
    sched.make_params(small_config(policy="sarathi_dynamic"), policy={"lo": 3})
  with pytest.raises(ValueError, match="policy_args=stages=0: must be a positive number"):
    sched.make_params(small_config(policy="sarathi_dynamic"), policy={"stages": 0})
  config = small_config(policy="sglang")
  sched.make_params(config, policy={"prefill_decode_interval": 0, "chunked_prefill_size": -1})
  for value in (-1, 101, float("inf"), float("nan")):
    message = f"policy_args=prefill_decode_interval={value}: must be in \\[0, 100\\]"
    with pytest.raises(ValueError, match=message):
      sched.make_params(config, policy={"prefill_decode_interval": value})


@pytest.mark.parametrize("policy", ["orca", "static", "prefill_first"])
def test_what_a_policy_can_never_serve_is_refused(policy):
  config = config_for(policy)
  params = sched.make_params(config, budget=11)
  with pytest.raises(ValueError, match=f"exceed budget=11 with policy={policy}"):
    sched.check_request(config, params, 12, 4)
