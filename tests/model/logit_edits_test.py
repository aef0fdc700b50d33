"""Edits of logits against a plain loop, and through `sample`: a row edits itself alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine import SamplingParams
from jaxserve.engine.sampling_row import sampling_row
from jaxserve.model import logit_edits, sampling
from tests.model.sampling_test import _logits, _options

VOCAB, LENGTH = 211, 23
TOKENS = np.random.default_rng(4).integers(0, 12, LENGTH).astype(np.int32)
NUM_PROMPT, POSITION = 7, 17
EDIT = jax.jit(logit_edits.edit)


@jax.jit
def SAMPLE(logits, options, edits, tokens):
  edit = lambda row, o: logit_edits.edit(row, edits, o.request, o.position, tokens)
  return sampling.sample(logits, options, edit)


def _table(*rows):
  rows = [sampling_row(sampling, VOCAB, NUM_PROMPT, stop_ids=(3, 9)).edits for sampling in rows]
  return jax.tree.map(lambda *columns: jnp.stack(columns), *rows)


def _edited(sampling, logits, position=POSITION, tokens=TOKENS):
  return np.asarray(EDIT(logits, _table(sampling), jnp.int32(0), jnp.int32(position), tokens))


def _oracle(sampling, logits, position):
  out = logits.astype(np.float64)
  for token, bias in sampling.logit_bias:
    out[token] += bias
  prompt, outputs = TOKENS[:NUM_PROMPT].tolist(), TOKENS[NUM_PROMPT:position].tolist()
  for token in set(prompt + outputs):
    r = sampling.repetition_penalty
    out[token] = out[token] / r if out[token] > 0 else out[token] * r
  for token in set(outputs):
    out[token] -= sampling.frequency_penalty * outputs.count(token) + sampling.presence_penalty
  if position < NUM_PROMPT + sampling.min_tokens:
    out[[3, 9]] = -np.inf
  if sampling.allowed_token_ids is not None:
    out[[t for t in range(VOCAB) if t not in sampling.allowed_token_ids]] = -np.inf
  out[list(sampling.bad_token_ids)] = -np.inf
  return out


OPTIONS = [
  {},
  {"presence_penalty": 0.7},
  {"frequency_penalty": -1.5},
  {"repetition_penalty": 1.8},
  {"repetition_penalty": 0.5, "presence_penalty": 2.0, "frequency_penalty": 0.3},
  {"logit_bias": ((0, 100.0), (210, -3.5), (5, 1.0))},
  {"min_tokens": 11},
  {"min_tokens": 10},
  {"allowed_token_ids": (0, 31, 32, 63, 210)},
  {"bad_token_ids": (1, 64, 210)},
  {"allowed_token_ids": (4, 5, 6), "bad_token_ids": (5,), "logit_bias": ((4, 9.0),)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_edits_match_a_plain_loop(options):
  sampling, (logits,) = SamplingParams(**options), _logits(1, seed=6)
  for position in (NUM_PROMPT, POSITION, LENGTH):
    expected = _oracle(sampling, logits, position)
    np.testing.assert_allclose(_edited(sampling, logits, position), expected, rtol=2e-6, atol=1e-6)


def test_tokens_at_the_position_and_behind_it_do_not_count():
  sampling, (logits,) = SamplingParams(presence_penalty=1.0, repetition_penalty=2.0), _logits(1)
  other = TOKENS.copy()
  other[POSITION:] = 200
  assert np.array_equal(_edited(sampling, logits), _edited(sampling, logits, tokens=other))


def test_a_row_edits_itself_alone():
  plain, changed = SamplingParams(), SamplingParams(allowed_token_ids=(8,))
  hot = SamplingParams(bad_token_ids=(1, 2), presence_penalty=2.0)
  edits = _table(plain, changed, hot)

  def run(rows, requests, temperature):
    requests = np.asarray(requests, np.int32)
    options = _options(
      len(rows), temperature=temperature, request=requests, position=POSITION, num_top=20,
      edited=np.asarray(edits.active)[requests],
    )  # fmt: skip
    return SAMPLE(logits[rows], options, edits, TOKENS)

  logits = _logits(3, seed=9)
  together = run([0, 1, 2], [0, 1, 2], [0.0, 0.0, 1.0])
  assert int(together.tokens[0]) == logits[0].argmax() and int(together.tokens[1]) == 8
  for row in range(3):
    alone = run([row], [row], 1.0 if row == 2 else 0.0)
    mine = jax.tree.map(lambda x, row=row: np.asarray(x[row : row + 1]), together)
    jax.tree.map(np.testing.assert_array_equal, dataclasses.asdict(alone), dataclasses.asdict(mine))
  np.testing.assert_array_equal(together.top_ids, np.argsort(-logits, axis=1)[:, :20])


def test_few_alternatives_are_filled_up():
  logits = _logits(2)
  few = SAMPLE(logits, _options(2, temperature=0.0, num_top=8), _table(SamplingParams()), TOKENS)
  assert few.top_ids.shape == (2, 20) and np.isneginf(few.top_logits[:, 8:]).all()
  np.testing.assert_array_equal(few.top_ids[:, :8], np.argsort(-logits, axis=1)[:, :8])


BAD = [
  {"min_tokens": -1}, {"presence_penalty": 2.1}, {"frequency_penalty": float("nan")},
  {"repetition_penalty": 0.0}, {"repetition_penalty": float("inf")}, {"logit_bias": ((1, 101.0),)},
  {"logit_bias": tuple((t, 1.0) for t in range(301))}, {"allowed_token_ids": ()},
  {"num_top": 21}, {"prompt_logprobs": 21},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD, ids=lambda f: next(iter(f)))
def test_an_option_out_of_range_is_named(fields):
  with pytest.raises(ValueError, match=f"^{next(iter(fields))}="):
    SamplingParams(**fields)


def test_what_leaves_nothing_to_draw_is_refused():
  ask = lambda **fields: SamplingParams(**fields).check(VOCAB, (3,))
  with pytest.raises(ValueError, match="allowed_token_ids"):
    ask(allowed_token_ids=(5,), bad_token_ids=(5,))
  with pytest.raises(ValueError, match="allowed_token_ids"):
    ask(allowed_token_ids=(3,), min_tokens=1)
  with pytest.raises(ValueError, match="bad_token_ids"):
    ask(bad_token_ids=tuple(range(VOCAB)))
  with pytest.raises(ValueError, match=r"logit_bias\[0\]=211"):
    ask(logit_bias=((VOCAB, 1.0),))
  with pytest.raises(ValueError, match="min_tokens=1: holds back at most 64"):
    ask(min_tokens=1, stop_token_ids=tuple(range(70)))
  assert ask(allowed_token_ids=(3, 4), stop_token_ids=(9, 3)) == (3, 9)
