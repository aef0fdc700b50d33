"""The buckets that pad a load least, against trying all of them."""

import itertools

import numpy as np
import pytest

from experiments import served
from experiments.buckets import run
from jaxserve import workload
from jaxserve.config import token_buckets


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("most", [1, 3, 4])
def test_best_is_the_best_of_all(seed, most):
  rng = np.random.default_rng(seed)
  budget = 11
  counts = rng.integers(0, 9, budget + 1) * (rng.random(budget + 1) < 0.7)
  counts[0] = 0
  cost_of = np.cumsum(rng.random(budget + 1))

  def cost(buckets):
    bucket = np.asarray(buckets)[np.searchsorted(buckets, np.arange(budget + 1))]
    return (counts * cost_of[bucket]).sum()

  others = itertools.chain.from_iterable(
    itertools.combinations(range(1, budget), size) for size in range(most)
  )
  least = min(cost((*some, budget)) for some in others)
  found = run.best(counts, cost_of, most)
  assert found[-1] == budget and len(found) <= most and found == tuple(sorted(set(found)))
  assert cost(found) == pytest.approx(least)


def test_steps_are_counted_and_padding_is_what_is_not_theirs():
  server = served.Server(model="llama3-8b", hardware="h100", seats=4, length=256, kv_tokens=2048)
  load = workload.Workload(
    arrival_s=np.zeros(2), num_prompt=np.array([70, 30]), num_output=np.array([3, 5])
  )
  counts = run.token_counts(load, server, budget=64)
  # 70 + 30 prompt tokens, and one decode for every output but the first.
  assert (counts * np.arange(65)).sum() == 100 + 2 + 4 and counts[64] == 1
  share, _ = run.padding(counts, (64,), np.arange(65.0))
  assert share == pytest.approx(1 - 106 / (64 * counts.sum()))
  assert run.padding(counts, tuple(range(1, 65)), np.arange(65.0)) == (0, 1)
  assert run.padding(counts, token_buckets(64), np.arange(65.0))[0] < share
