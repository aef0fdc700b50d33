"""Which part of its keys each work item of a decode takes, so that a step occupies the device.

A decode reads all of its keys and computes little, so what counts is that every multiprocessor
reads, about as long as the others. One chunk length serves all decodes of a step (FlashInfer's
plan, arXiv:2501.01005, section 3.3): the smallest for which the items stay within a limit, so
that long contexts are cut into many items and short ones are not cut.

The limit follows the step's decodes and not its token bucket: a plan laid out for a large bucket
holds that of a small one (see `types.cut_plan`).
"""

import jax
import jax.numpy as jnp

from jaxserve.config import SplitKV


def most_items(num_decodes: jax.Array, splits: SplitKV) -> jax.Array:
  """How many items a step may have: i32[], at most num_decodes + capacity if there are decodes.

  One filling of the device, which few decodes share exactly; beside many decodes half a filling
  more, which cuts those that are longer than the others.

  Args:
    num_decodes: i32[].
    splits: static.
  """
  return jnp.maximum(splits.capacity, num_decodes + splits.capacity // 2)


def chunk_keys(keys: jax.Array, splits: SplitKV, max_keys: int) -> jax.Array:
  """The length of the step's chunks: i32[], the smallest multiple of the tile that is allowed.

  Allowed is at least `min_keys`, with sum(ceil(keys / chunk)) within `most_items`; the longest
  context as one chunk always is.

  Args:
    keys: i32[R], keys that each decode sees; 0 for rows that do not decode.
    splits: static.
    max_keys: static, at least every element of `keys`.

  Cost: O(R log(max_keys / tile)): the count falls with the length, so the longest length with too
    many items is found bit by bit.
  """
  limit = most_items(jnp.sum(keys > 0, dtype=jnp.int32), splits)
  too_short = jnp.int32(0)  # tiles
  for bit in reversed(range((-(-max_keys // splits.tile)).bit_length())):
    longer = too_short | (1 << bit)
    count = jnp.sum(count_items(keys, longer * splits.tile), dtype=jnp.int32)
    too_short = jnp.where(count > limit, longer, too_short)
  return jnp.maximum((too_short + 1) * splits.tile, splits.min_keys)


def count_items(keys: jax.Array, chunk: jax.Array) -> jax.Array:
  """Items of each row: i32[R], ceil(keys / chunk); split s has keys [s * chunk, (s + 1) * chunk).

  Args:
    keys: i32[R], keys that each decode sees; 0 for rows that do not decode.
    chunk: i32[], keys of an item.
  """
  return (keys + chunk - 1) // chunk
