"""The pool with a prefix cache: against a plain one, and where the two could be fooled."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import cache
from jaxserve.cache import prefix
from tests.testing import prefix_oracle
from tests.testing.prefix_twins import check_pool, free_cached

M = 11


def jitted(fn):
  return jax.jit(fn)


LOOKUP, ACQUIRE, PUBLISH, RELEASE, RESET = map(
  jitted, (prefix.lookup, prefix.acquire, prefix.publish, prefix.release, prefix.reset)
)
ALLOCATE = jax.jit(functools.partial(prefix.allocate, size=M))


def padded(pages):
  ids = np.zeros(M, np.int32)
  ids[: len(pages)] = pages
  return ids, np.int32(len(pages))


def table(digests):
  rows = np.zeros((M, 4), np.uint32)
  rows[: len(digests)] = digests
  return rows, np.int32(len(digests))


def chain(family, depth):
  """Digests of `depth` pages of a text; texts of one family begin alike."""
  tokens = [family // 3 if i < 2 * (family % 3) + 2 else 100 + family for i in range(depth)]
  return cache.page_digests(tokens, 1, cache.root_digest(b""))


class Pools:
  """The arrays and the plain model."""

  def __init__(self, num_pages):
    self.pool, self.model = prefix.create(num_pages), prefix_oracle.Pool(num_pages)
    self.rows = []

  def enter(self, digests, more):
    """A request: hits, then pages; all full pages are published."""
    ids, length = LOOKUP(self.pool, *table(digests))
    hit = self.model.lookup([d.tobytes() for d in digests])
    assert ids[: int(length)].tolist() == hit and (ids[int(length) :] == len(self.model.refs)).all()
    need = len(digests) + more - len(hit)
    cold = sum(self.model.refs[page] == 0 for page in hit)
    if need + cold > self.model.num_free:
      return
    self.pool = ACQUIRE(self.pool, *padded(hit))
    self.model.acquire(hit)
    self.pool, new = ALLOCATE(self.pool, np.int32(need))
    assert new[:need].tolist() == [self.model.allocate() for _ in range(need)]
    pages = hit + new[:need].tolist()
    fresh, digests_ = pages[len(hit) : len(digests)], digests[len(hit) :]
    self.pool = PUBLISH(self.pool, padded(fresh)[0], *table(digests_))
    for page, digest in zip(fresh, digests_, strict=True):
      self.model.publish(page, digest.tobytes())
    self.rows.append(pages)
    check_pool(host(self.pool), self.model)

  def leave(self, index):
    pages = self.rows.pop(index)
    self.pool = RELEASE(self.pool, *padded(pages))
    self.model.release(pages)
    check_pool(host(self.pool), self.model)

  def reset(self):
    self.pool = RESET(self.pool)
    self.model.reset()
    check_pool(host(self.pool), self.model)


def host(tree):
  return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("num_pages", [13, 37])
def test_random_lives_equal_a_plain_pool(num_pages):
  rng, pools = np.random.default_rng(num_pages), Pools(num_pages)
  compactions = 0
  for _ in range(350):
    if pools.rows and rng.random() < 0.45:
      tail = int(pools.pool.tail)
      pools.leave(int(rng.integers(0, len(pools.rows))))
      compactions += int(pools.pool.tail) < tail
    elif not pools.rows and rng.random() < 0.2:
      pools.reset()
    else:
      pools.enter(chain(int(rng.integers(0, 9)), int(rng.integers(0, 9))), int(rng.integers(0, 3)))
  assert pools.model.evicted > 30 and compactions > 2


def test_order_of_reuse_is_junk_first_then_the_longest_unused_last_page_first():
  pools = Pools(10)
  common, a, b = chain(0, 2), chain(1, 3), chain(7, 3)
  assert (a[:2] == common).all()
  pools.enter(a, 1)  # 0 1 2 | 3
  pools.enter(b, 1)  # 4 5 6 | 7
  pools.leave(0)
  pools.leave(0)
  assert pools.pool.empty[: int(pools.pool.num_empty)].tolist()[::-1] == [7, 3, 8, 9]
  assert free_cached(host(pools.pool)) == [2, 1, 0, 6, 5, 4]
  pools.enter(a[:1], 0)  # 0 is used again, and goes behind the others
  pools.leave(0)
  assert free_cached(host(pools.pool)) == [2, 1, 6, 5, 4, 0]


def test_the_newest_copy_of_a_content_is_the_one_that_is_found():
  pools = Pools(5)
  digests = chain(0, 1)
  pools.enter(digests, 0)
  old, (new,) = pools.rows[0][0], np.asarray(ALLOCATE(pools.pool, np.int32(1))[1][:1])
  pools.pool, _ = ALLOCATE(pools.pool, np.int32(1))
  assert pools.model.allocate() == new
  pools.pool = PUBLISH(pools.pool, padded([new])[0], *table(digests))
  pools.model.publish(int(new), digests[0].tobytes())
  check_pool(host(pools.pool), pools.model)
  assert LOOKUP(pools.pool, *table(digests))[0][0] == new != old


@pytest.mark.parametrize("word", range(4))
def test_digests_are_compared_in_full(word):
  pools, digests = Pools(7), chain(3, 2)
  pools.enter(digests, 0)
  forged = digests.copy()
  forged[0, word] ^= np.uint32(1 << 31)
  assert LOOKUP(pools.pool, *table(digests))[1] == 2
  assert LOOKUP(pools.pool, *table(forged))[1] == 0
  forged = digests.copy()
  forged[1, word] ^= np.uint32(1 << 31)
  assert LOOKUP(pools.pool, *table(forged))[1] == 1


def test_a_full_set_of_the_index_loses_a_hit_and_nothing_else():
  pool = prefix.create(37)
  pool, ids = prefix.allocate(pool, jnp.int32(prefix.WAYS + 2), M)
  digests = np.zeros((M, 4), np.uint32)
  digests[:, 0], digests[:, 1] = 1 + np.arange(M), 5  # all in one set
  pool = PUBLISH(pool, ids, digests, np.int32(prefix.WAYS + 2))
  found = [int(LOOKUP(pool, *table(digests[i : i + 1]))[1]) for i in range(prefix.WAYS + 2)]
  assert found == [1] * prefix.WAYS + [0, 0]
  pool = RELEASE(pool, ids, np.int32(prefix.WAYS + 2))
  assert int(pool.num_free) == 37
  assert len(free_cached(host(pool))) == prefix.WAYS


def test_scan_and_vmap_do_what_single_calls_do():
  def life(pool, family):
    digests = jnp.stack([jnp.arange(5, dtype=jnp.uint32) + 7 * family + 1] * 4, axis=1)
    ids, length = prefix.lookup(pool, digests, jnp.int32(4))
    pool = prefix.acquire(pool, ids, length)
    pool, new = prefix.allocate(pool, 5 - length, 5)
    lane = jnp.arange(5)
    row = jnp.where(lane < length, ids, jnp.roll(new, length))
    fresh = jnp.roll(row, -length)
    pool = prefix.publish(pool, fresh, jnp.roll(digests, -length, axis=0), 4 - length)
    return prefix.release(pool, row, jnp.int32(5)), length

  families = np.random.default_rng(0).integers(0, 5, (3, 40)).astype(np.uint32)
  start = prefix.create(13)
  one = jax.jit(lambda fs: jax.lax.scan(life, start, fs))
  many = jax.jit(jax.vmap(lambda fs: jax.lax.scan(life, start, fs)))
  together = many(families)
  for lane in range(3):
    chex.assert_trees_all_equal(jax.tree.map(lambda x, i=lane: x[i], together), one(families[lane]))
  pool, step = start, jax.jit(life)
  lengths = []
  for family in families[0]:
    pool, length = step(pool, family)
    lengths.append(int(length))
  chex.assert_trees_all_equal((pool, jnp.asarray(lengths)), one(families[0]))
  assert 0 < sum(lengths) < 4 * 40
