import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.sampling_row import empty_sampling_table
from jaxserve.model import sampling
from jaxserve.model.sampling import RowOptions

VOCAB = 211
SAMPLE = jax.jit(sampling.sample)


def _options(rows, **given):
  defaults = {
    "temperature": (1.0, np.float32), "top_k": (0, np.int32), "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32), "seed": (0, np.uint32), "position": (0, np.int32),
    "num_top": (0, np.int32), "request": (0, np.int32), "edited": (False, np.bool_),
  }  # fmt: skip
  fields = {
    name: np.broadcast_to(np.asarray(given.get(name, value), dtype), (rows,))
    for name, (value, dtype) in defaults.items()
  }
  return RowOptions(**fields)


def _logits(rows, seed=0, scale=2.0):
  return (scale * np.random.default_rng(seed).standard_normal((rows, VOCAB))).astype(np.float32)


def _oracle(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """Probabilities after the restrictions, by sorting, in float64."""
  z = logits.astype(np.float64) / temperature
  p = np.exp(z - z.max())
  p[p < min_p] = 0
  order = np.argsort(-logits, kind="stable")
  if top_k:
    p[order[top_k:]] = 0
  p /= p.sum()
  # A token stays while the more likely ones have not yet reached top_p.
  before = np.cumsum(p[order]) - p[order]
  p[order[1:][before[1:] >= top_p]] = 0
  return p / p.sum()


RESTRICTIONS = [
  {},
  {"temperature": 0.7},
  {"temperature": 3.0, "top_k": 5},
  {"top_k": 1},
  {"top_k": VOCAB + 4},
  {"top_p": 0.6},
  {"top_p": 0.0},
  {"top_p": 1e-6},
  {"min_p": 0.1},
  {"min_p": 1.0},
  {"temperature": 1.3, "top_k": 17, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("given", RESTRICTIONS, ids=str)
def test_frequencies_match_the_sorted_oracle(given):
  rows = 4096
  logits = np.repeat(_logits(1, seed=11), rows, axis=0)
  tokens = np.asarray(SAMPLE(logits, _options(rows, seed=np.arange(rows), **given)).tokens)
  expected = _oracle(logits[0], **given)
  counts = np.bincount(tokens, minlength=VOCAB)
  assert not counts[expected == 0].any()
  # Pearson's statistic is near its degrees of freedom; 5 sigma on either seed would be a bug.
  likely = expected * rows >= 5
  chi2 = ((counts - expected * rows)[likely] ** 2 / (expected * rows)[likely]).sum()
  freedom = max(likely.sum(), 1)
  assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("given", RESTRICTIONS, ids=str)
def test_the_support_is_exactly_the_oracles(given):
  # Few rows, many vocabularies: which tokens survive is compared, not how often they are drawn.
  for logits in _logits(5, seed=3):
    kept = _kept(logits, **given)
    np.testing.assert_array_equal(kept, np.flatnonzero(_oracle(logits, **given)))


@pytest.mark.parametrize("given", [{"top_k": 9000}, {"top_k": 50}, {"top_p": 0.999}], ids=str)
def test_thresholds_outside_the_best_groups_are_found_too(given):
  logits = np.random.default_rng(8).standard_normal(20011).astype(np.float32)
  kept = _kept(logits, **given)
  np.testing.assert_allclose(len(kept), np.count_nonzero(_oracle(logits, **given)), rtol=1e-3)
  np.testing.assert_array_equal(np.sort(np.argsort(-logits)[: len(kept)]), kept)


def _kept(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  if top_k == 1 or top_p == 0:
    return [int(SAMPLE(logits[None], _options(1, top_k=top_k, top_p=top_p)).tokens[0])]
  options = _options(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
  row = jax.tree.map(lambda x: x[0], options)
  return np.flatnonzero(jax.jit(sampling.restricted)(logits, row))


def test_greedy_is_argmax_with_the_lowest_index_on_ties():
  logits = np.round(_logits(7, scale=0.7))
  output = SAMPLE(logits, _options(7, temperature=0.0))
  np.testing.assert_array_equal(output.tokens, logits.argmax(1))


def test_top_k_in_two_levels_equals_lax_with_ties():
  for vocab in (8, 64, 211, 1000):
    logits = np.random.default_rng(vocab).integers(0, 9, (5, vocab)).astype(np.float32)
    logits[0] = 3.0
    for k in (1, 8):
      got, expected = sampling.top_k(logits, k), jax.lax.top_k(logits, k)
      np.testing.assert_array_equal(got[0], expected[0])
      np.testing.assert_array_equal(got[1], expected[1])


def test_logprobs_are_of_the_unmodified_logits():
  logits = _logits(5)
  output = SAMPLE(logits, _options(5, temperature=0.5, top_k=3, seed=np.arange(5)))
  logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
  expected = logprobs[np.arange(5), np.asarray(output.tokens)]
  np.testing.assert_allclose(output.logprobs, expected, rtol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours_nor_on_the_batch_size():
  logits = _logits(13, seed=2)
  options = _options(
    13, temperature=np.linspace(0, 2, 13), top_p=np.linspace(0.3, 1, 13),
    top_k=np.arange(13) * 7, seed=np.arange(13) % 3, position=np.arange(13) + 5,
  )  # fmt: skip
  together = np.asarray(SAMPLE(logits, options).tokens)
  order = np.random.default_rng(0).permutation(13)
  shuffled = SAMPLE(logits[order], jax.tree.map(lambda x: x[order], options))
  np.testing.assert_array_equal(shuffled.tokens, together[order])
  alone = [
    int(SAMPLE(logits[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], options)).tokens[0])
    for i in range(13)
  ]
  assert alone == together.tolist()


def test_seed_and_position_both_change_the_draw():
  logits = np.zeros((500, VOCAB), np.float32)
  by_seed = SAMPLE(logits, _options(500, seed=np.arange(500))).tokens
  by_position = SAMPLE(logits, _options(500, position=np.arange(500))).tokens
  again = SAMPLE(logits, _options(500, position=np.arange(500))).tokens
  assert len(set(np.asarray(by_seed))) > 150 and len(set(np.asarray(by_position))) > 150
  np.testing.assert_array_equal(by_position, again)


def test_ties_at_a_threshold_are_all_kept():
  logits = np.zeros((1, VOCAB), np.float32)
  row = jax.tree.map(lambda x: x[0], _options(1, top_k=3))
  assert np.count_nonzero(sampling.restricted(logits[0], row)) == VOCAB


def test_extreme_logits_stay_finite():
  logits = np.full((3, VOCAB), -np.inf, np.float32)
  logits[0, 7], logits[1, [5, 9]], logits[2, 0] = 1e30, -1e30, 0.0
  output = SAMPLE(logits, _options(3, temperature=1e-3, top_p=0.9, top_k=2, min_p=0.1))
  assert int(output.tokens[0]) == 7
  assert int(output.tokens[1]) in (5, 9)
  assert int(output.tokens[2]) == 0


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_a_token_of_weight_zero_is_never_drawn(uniform):
  rng = np.random.default_rng(1)
  for positive in (1, 2, 50):
    weights = np.zeros(VOCAB, np.float32)
    weights[rng.choice(VOCAB, positive, replace=False)] = rng.random(positive) + 1e-3
    token = int(sampling.invert(jnp.asarray(weights), jnp.float32(uniform)))
    assert weights[token] > 0


def test_padded_rows_are_greedy():
  table = dataclasses.replace(
    empty_sampling_table(3, VOCAB), temperature=jnp.ones(3), seed=jnp.arange(3, dtype=jnp.uint32)
  )
  rows = sampling.row_options(table, jnp.asarray([2, 3]), jnp.asarray([4, 0]))
  fields = {f.name: np.asarray(getattr(rows, f.name)).tolist() for f in dataclasses.fields(rows)}
  assert fields["temperature"] == [1.0, 0.0]
  assert fields["seed"] == [2, 0] and fields["position"] == [4, 0]
