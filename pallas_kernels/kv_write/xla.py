"""A scatter, which XLA does in place for any dtype but bfloat16 on XLA:CPU (see `KVCache`)."""

import jax
import jax.numpy as jnp


def kv_write(
  k_pages: jax.Array,
  v_pages: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  slot_mapping: jax.Array,
  first_slot: jax.Array | int = 0,
  num_slots: int,
) -> tuple[jax.Array, jax.Array]:
  """See `api.kv_write`."""
  total = k_pages.shape[0] * k_pages.shape[1]
  if len(k) == 1:
    # XLA turns a scatter of one row into an update that copies the pool; a second row is dropped.
    k, v = (jnp.concatenate([x, x]) for x in (k, v))
    slot_mapping = jnp.concatenate([slot_mapping, jnp.full_like(slot_mapping, num_slots)])
  # Distinct and past the end: the scatter drops them and may rely on there being no duplicates.
  outside = total + jnp.arange(len(k), dtype=slot_mapping.dtype)
  slots = jnp.where(slot_mapping < num_slots, first_slot + slot_mapping, outside)

  def stored(pages: jax.Array, values: jax.Array) -> jax.Array:
    flat = pages.reshape(-1, *pages.shape[2:])
    return flat.at[slots].set(values, mode="drop", unique_indices=True).reshape(pages.shape)

  return stored(k_pages, k), stored(v_pages, v)
