"""Whole random lives with a prefix cache: array state against plain loops, for every policy."""

import numpy as np
import pytest

from jaxserve import sched
from tests.sched.life_test import drain
from tests.testing import oracle
from tests.testing.own_policy_oracles import random_args
from tests.testing.prefix_twins import prefix_life
from tests.testing.scheduling import small_config

pytestmark = pytest.mark.one_leg

POLICIES = sorted(name for name, p in sched.POLICIES.items() if not p.no_prefix_cache)
CONFIGS = {
  "fcfs": {},
  "none": {"reserve": "none"},
  "gate": {"reserve": "gate"},
  "priority": {"ordering": "priority"},
  "vllm": {"reserve": "gate", "recompute_last_page": True},
  "roomy": {"num_pages": 71},
}


def live_and_drain(rng, config, steps):
  whole = sched.POLICIES[config.policy].whole_prompts
  params = oracle.Params(
    budget=config.max_budget if whole else int(rng.integers(5, config.max_budget + 1)),
    max_num_seqs=int(rng.integers(1, 6)),
    threshold=int(rng.choice([0, 0, 4])),
    watermark_pages=int(rng.integers(0, 2)),
    policy=random_args(config.policy, rng),
  )
  drain(prefix_life(rng, config, params, steps), params)


SLOW_CONFIGS = ("fcfs", "gate", "roomy")
SLOW_POLICIES = ("orca", "prefill_first", "sarathi_dynamic", "static")


def quick_first(names, slow):
  return [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in names]


@pytest.mark.parametrize("name", quick_first(CONFIGS, SLOW_CONFIGS))
def test_random_lives_equal_the_loop(name):
  rng = np.random.default_rng(len(name))
  config = small_config(prefix_cache=True, **CONFIGS[name])
  for _ in range(2):
    live_and_drain(rng, config, steps=80)


@pytest.mark.parametrize(
  "policy", quick_first([p for p in POLICIES if p != "vllm_v1"], SLOW_POLICIES)
)
def test_random_lives_equal_the_loop_of_every_policy(policy):
  rng = np.random.default_rng(len(policy))
  whole = sched.POLICIES[policy].whole_prompts
  config = small_config(policy=policy, prefix_cache=True, max_budget=31 if whole else 17)
  live_and_drain(rng, config, steps=100)
