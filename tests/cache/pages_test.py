"""The page pool against a plain Python list."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import cache

NUM_PAGES, LANES = 11, 5


def test_fresh_pool_hands_out_pages_in_order():
  pool, ids = cache.allocate(cache.create(NUM_PAGES), jnp.int32(3), LANES)
  assert ids.tolist() == [0, 1, 2, NUM_PAGES, NUM_PAGES]
  assert int(pool.num_free) == NUM_PAGES - 3


@given(st.lists(st.tuples(st.booleans(), st.integers(0, LANES)), max_size=30))
def test_pool_equals_a_stack(ops):
  pool, stack, held = cache.create(NUM_PAGES), list(range(NUM_PAGES))[::-1], []
  for take, count in ops:
    if take:
      count = min(count, len(stack))
      pool, ids = cache.allocate(pool, jnp.int32(count), LANES)
      want = [stack.pop() for _ in range(count)]
      assert ids.tolist() == want + [NUM_PAGES] * (LANES - count)
      held += want
    else:
      back = [held.pop() for _ in range(min(count, len(held)))]
      ids = np.full(LANES, 3, np.int32)  # what lies past the count is ignored
      ids[: len(back)] = back
      pool = cache.release(pool, jnp.asarray(ids), jnp.int32(len(back)))
      stack += back[::-1]
    assert int(pool.num_free) == len(stack)
    assert pool.free_pages[: len(stack)].tolist() == stack
