"""A stack of free KV pages as arrays: create, allocate, release.

Axis letters: N pages, B lanes of a padded list. A padded list of page ids comes with its true
length; the rest is ignored on the way in and N on the way out.
"""

import jax
import jax.numpy as jnp

from jaxserve.types import PagePool


def create(num_pages: int) -> PagePool:
  """All pages free, to be handed out as 0, 1, 2..."""
  return PagePool(
    free_pages=jnp.arange(num_pages, dtype=jnp.int32)[::-1],
    num_free=jnp.array(num_pages, jnp.int32),
  )


def allocate(pool: PagePool, count: jax.Array, size: int) -> tuple[PagePool, jax.Array]:
  """Takes `count` pages off the stack, the most recently freed first.

  Args:
    pool: not modified.
    count: i32[], at most `size` and at most pool.num_free; the caller checks.
    size: B, static.

  Returns:
    (pool, page ids i32[B], N from `count` on).

  Cost: O(B).
  """
  num_pages = pool.free_pages.shape[0]
  lane = jnp.arange(size, dtype=jnp.int32)
  ids = pool.free_pages.at[pool.num_free - 1 - lane].get(mode="clip")
  ids = jnp.where(lane < count, ids, num_pages)
  return PagePool(free_pages=pool.free_pages, num_free=pool.num_free - count), ids


def release(pool: PagePool, ids: jax.Array, count: jax.Array) -> PagePool:
  """Puts the first `count` of `ids`, i32[B], back; the first of them will be reused first.

  Cost: O(B).
  """
  num_pages, size = pool.free_pages.shape[0], ids.shape[0]
  lane = jnp.arange(size, dtype=jnp.int32)
  cell = jnp.where(lane < count, pool.num_free + count - 1 - lane, num_pages + lane)
  free = pool.free_pages.at[cell].set(ids, mode="drop", unique_indices=True)
  return PagePool(free_pages=free, num_free=pool.num_free + count)
