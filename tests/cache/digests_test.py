"""Digests: chained, salted, never zero in word 0, the same in every process."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import cache

ROOT = cache.root_digest(b"run")


def test_a_digest_stands_for_its_page_and_all_before_it():
  one = cache.page_digests([1, 2, 3, 4, 5, 6, 7], 3, ROOT)
  assert one.shape == (2, 4) and one.dtype == np.uint32
  assert (cache.page_digests([1, 2, 3, 4, 5, 9], 3, ROOT)[0] == one[0]).all()
  other = cache.page_digests([0, 2, 3, 4, 5, 6], 3, ROOT)
  assert (other != one).all(), "another first page changes all words of all digests behind it"
  assert (cache.page_digests([4, 5, 6], 3, one[0].tobytes())[0] == one[1]).all()


def test_the_bytes_are_those_of_sha256_over_parent_and_tokens():
  page = hashlib.sha256(ROOT + np.asarray([1, 2, 70_000], "<i4").tobytes()).digest()
  assert cache.page_digests([1, 2, 70_000], 3, ROOT)[0].tobytes() == page[:16]


def test_two_salts_never_share():
  roots = [
    cache.root_digest(run, request)
    for run in (b"", b"run", b"run2")
    for request in (None, "", "a", "none", "some")
  ]
  digests = np.concatenate([cache.page_digests([5] * 8, 2, root) for root in roots])
  assert len(set(roots)) == len(roots)
  assert len({d.tobytes() for d in digests}) == len(digests)


def test_word_0_is_never_zero(monkeypatch):
  real = hashlib.sha256

  class Zeros:
    def __init__(self, data):
      self.data = data

    def digest(self):
      return b"\0" * 4 + real(self.data).digest()[4:]

  monkeypatch.setattr(hashlib, "sha256", Zeros)
  digests = cache.page_digests(list(range(9)), 3, ROOT)
  assert (digests[:, 0] == 1).all()


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 30), st.integers(1, 5))
def test_a_chain_grows_into_the_digests_of_the_whole(tokens, split, page_size):
  chain = cache.PageChain(tokens[:split], page_size, ROOT)
  digests = list(chain.prompt_digests)
  outputs = tokens[split:]
  while (digest := chain.catch_up(outputs)) is not None:
    digests.append(digest)
  whole = cache.page_digests(tokens, page_size, ROOT)
  assert len(digests) == len(whole) == chain.num_pages
  assert all((a == b).all() for a, b in zip(digests, whole, strict=True))
