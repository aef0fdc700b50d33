"""Words that an output must not have: one token, several, what is left of a mask."""

import numpy as np
import pytest

from jaxserve.server.bad_words import BadWords, Barred, runs_of
from jaxserve.text.tokenizer import ByteTokenizer
from tests.testing import servers

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def run():
  with servers.running() as run:
    yield run
    servers.eventually(run.is_empty)
    assert run.metric("retraces") == 0


class Spaced:
  """Words with their space are tokens: ' dog' 1, 'dog' 2, ' ' 3, letters their codes."""

  def encode(self, text, add_special_tokens):
    del add_special_tokens
    known = {" dog": [1], "dog": [2], " cat": [3, 4], "cat": [4]}
    return known.get(text, [ord(letter) for letter in text])


def test_a_word_with_and_without_a_space():
  assert runs_of(["dog"], Spaced()) == [(2,), (1,)]
  assert runs_of([" dog", "dog"], Spaced()) == [(2,), (1,)]
  assert runs_of(["cat"], Spaced()) == [(4,)]  # its space is a token of its own
  assert runs_of(["ab"], ByteTokenizer()) == [(97, 98)]
  assert runs_of([" "], ByteTokenizer()) == [(32,)]


def bits(mask):
  return {i for i in range(64) if mask[i // 32] >> (i % 32) & 1}


def barred(runs, allowed=range(64), min_tokens=0, stops=()):
  mask = np.zeros(2, np.uint32)
  for token in allowed:
    mask[token // 32] |= np.uint32(1 << token % 32)
  return BadWords(Barred(runs, mask, min_tokens, stops), None)


def test_the_last_token_of_a_run_is_barred_behind_the_others():
  words = barred([(5,), (1, 2), (1, 2, 40), (2, 1)], allowed=[1, 2, 5, 40])
  copy = words.copy()
  expected = [{1, 2, 40}, {1, 40}, {1, 2, 40}, {2, 40}, {1, 2, 40}]
  for allowed, token in zip(expected, [1, 40, 2, 40, 1], strict=True):
    assert bits(words.mask()) == allowed and not words.accept(token)
  assert bits(copy.mask()) == {1, 2, 40}
  assert words.error is copy.error is None


def test_when_nothing_is_left_the_next_token_ends_it():
  words = barred([(1, 1)], allowed=[1])
  assert bits(words.mask()) == {1} and not words.accept(1)
  assert len(bits(words.mask())) == 64 and words.error and words.accept(7)


def test_a_token_that_min_tokens_holds_back_is_not_left():
  words = barred([(1, 1)], allowed=[1, 9], min_tokens=2, stops=[9])
  assert bits(words.mask()) == {1, 9} and not words.accept(1)
  assert len(bits(words.mask())) == 64 and words.error


def test_over_http(run):
  ask = lambda **f: run.complete("Hello", max_tokens=24, return_token_ids=True, **f)["choices"][0]
  plain = ask()["token_ids"]
  assert ask(bad_words=[])["token_ids"] == plain
  printable = [t for t in range(33, 127)]
  fields = {"allowed_token_ids": printable}
  ids = ask(**fields)["token_ids"]
  word = bytes(ids[3:6]).decode()
  first = next(at for at in range(2, 24) if bytes(ids[at - 2 : at + 1]).decode() == word)
  others = ask(**fields, bad_words=[word])
  assert others["token_ids"][:first] == ids[:first] and others["token_ids"][first] != ids[first]
  assert word not in others["text"] and set(others["token_ids"]) <= set(printable)
  letters = sorted({chr(t) for t in ids})[:3]
  assert not set(letters) & set(ask(**fields, bad_words=letters)["text"])
  body = {"prompt": "Hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
  chunks = run.stream(TEXT, body | fields | {"bad_words": [word]})
  assert "".join(c["choices"][0]["text"] for c in chunks) == others["text"]
  both = run.complete("Hello", max_tokens=24, n=2, seed=1, temperature=1, bad_words=[word, "a"])
  assert all(word not in c["text"] and "a" not in c["text"] for c in both["choices"])


@pytest.mark.parametrize(
  "fields, code",
  [
    ({"bad_words": ["a"], "allowed_token_ids": [97]}, "conflicting_fields"),
    ({"bad_words": ["aa"], "allowed_token_ids": [97]}, "structure_failed"),
    ({"bad_words": ["aa"], "allowed_token_ids": [97, 98], "stop_token_ids": [98],
      "min_tokens": 9}, "structure_failed"),
    ({"bad_words": [""]}, "invalid_value"),
    ({"bad_words": ["a"] * 257}, "invalid_value"),
  ],
  ids=str,
)  # fmt: skip
def test_what_cannot_be_served(run, fields, code):
  reply = run.post(TEXT, {"prompt": "x", "max_tokens": 9} | fields)
  error = reply.json()["error"]
  assert (reply.status_code, error["code"]) == (400, code)
  named = {"structure_failed": None, "conflicting_fields": "allowed_token_ids"}
  assert error["param"] == named.get(code, "bad_words")
