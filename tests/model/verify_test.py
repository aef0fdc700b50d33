"""Drafts: where they come from, which are accepted, and that sampling does not notice them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.model import ngram, sampling, verify
from jaxserve.model.ngram import Ngram

LENGTH, COUNT = 23, 3
HOW = Ngram(longest=3, shortest=1)
_propose = jax.jit(lambda histories, ends: ngram.propose(histories, ends, COUNT, HOW))


def lookup(tokens, count=COUNT, how=HOW):
  """The drafts of one text by plain search: the longest n-gram, then the latest place."""
  for n in range(how.longest, how.shortest - 1, -1):
    for end in range(len(tokens) - 1, n - 1, -1):
      if n < len(tokens) and tokens[end - n : end] == tokens[-n:]:
        found = list(tokens)
        for _ in range(count):
          found.append(found[end])
          end += 1
        return found[len(tokens) :]
  return []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=LENGTH), min_size=2, max_size=2))
def test_ngram_drafts_equal_a_plain_search(texts):
  rng = np.random.default_rng(0)
  histories = rng.integers(0, 3, (2, LENGTH)).astype(np.int32)  # what lies past a text is garbage
  for row, text in enumerate(texts):
    histories[row, : len(text)] = text
  tokens, counts = _propose(histories, np.asarray([len(t) for t in texts], np.int32))
  for row, text in enumerate(texts):
    want = lookup(text)
    assert int(counts[row]) == len(want)
    assert not want or tokens[row].tolist() == want


def test_a_repeated_token_is_drafted_on_and_on():
  history = np.full((1, LENGTH), 7, np.int32)
  tokens, counts = _propose(history, np.asarray([5], np.int32))
  assert tokens.tolist() == [[7, 7, 7]] and counts.tolist() == [3]


@pytest.mark.parametrize("fields", [dict(shortest=0), dict(longest=1, shortest=2)])
def test_odd_lengths_are_refused(fields):
  with pytest.raises(ValueError, match="must be at least"):
    Ngram(**fields)


def test_the_longest_run_of_right_drafts_counts_and_one_token_more():
  rows = [  # tokens drawn at each place, drafts that the next place computed, outputs
    ([5], [9], 1), ([1, 2, 3, 4], [1, 2, 3, 0], 4), ([1, 2, 3, 4], [1, 9, 3, 0], 2),
    ([8, 2, 3, 4], [1, 2, 3, 0], 1), ([6], [6], 1), ([1, 1], [1, 1], 2),
  ]  # fmt: skip
  tokens = np.concatenate([row[0] for row in rows]).astype(np.int32)
  drafts = np.concatenate([row[1] for row in rows]).astype(np.int32)
  offset = np.concatenate([np.arange(len(row[0])) for row in rows]).astype(np.int32)
  counts = np.asarray(jax.jit(lambda *a: verify.accept(*a, 3))(tokens, drafts, offset))
  ends = np.cumsum([len(row[0]) for row in rows])
  got = [int(part.sum()) for part in np.split(counts, ends[:-1])]
  assert got == [row[2] for row in rows]


# The 0.999 quantiles of chi-square by degrees of freedom.
CRITICAL = {4: 18.47, 5: 20.52, 6: 22.46}


def chi_square(tokens, weights):
  """Asserts that tokens have this distribution."""
  weights = np.asarray(weights, np.float64) / np.sum(weights)
  seen, want = np.bincount(tokens, minlength=len(weights)), weights * len(tokens)
  assert not seen[weights == 0].any()
  live = weights > 0
  statistic = ((seen - want)[live] ** 2 / want[live]).sum()
  assert statistic < CRITICAL[int(live.sum()) - 1], (statistic, seen, want)


def test_outputs_have_the_distribution_of_sampling_without_drafts():
  """Leviathan et al.: x is accepted with probability p(x), else p without x; what follows too."""
  rng, count, draft = np.random.default_rng(5), 4000, 2
  logits = rng.standard_normal((2, 7)).astype(np.float32)
  temperature = np.float32(0.8)
  p = np.exp(logits.astype(np.float64) / temperature)
  p /= p.sum(axis=1, keepdims=True)
  place = np.tile(np.asarray([0, 1], np.int32), count)
  options = sampling.RowOptions(
    temperature=jnp.full(2 * count, temperature),
    top_k=jnp.zeros(2 * count, jnp.int32),
    top_p=jnp.ones(2 * count),
    min_p=jnp.zeros(2 * count),
    seed=jnp.repeat(jnp.arange(count, dtype=jnp.uint32), 2),
    position=jnp.asarray(11 + place),
    num_top=jnp.zeros(2 * count, jnp.int32),
    request=jnp.zeros(2 * count, jnp.int32),
    edited=jnp.zeros(2 * count, bool),
  )
  tokens = np.asarray(jax.jit(sampling.sample)(jnp.asarray(logits[place]), options).tokens)
  drafts = np.full(2 * count, draft, np.int32)
  counts = np.asarray(verify.accept(jnp.asarray(tokens), jnp.asarray(drafts), place, 1))
  first, second = tokens[::2], tokens[1::2]
  accepted = counts[1::2]
  assert (accepted == (first == draft)).all()
  assert abs(accepted.mean() - p[0, draft]) < 4 * np.sqrt(p[0, draft] / count)
  chi_square(first, p[0])
  chi_square(first[~accepted], np.where(np.arange(7) == draft, 0, p[0]))
  chi_square(second[accepted], p[1])
