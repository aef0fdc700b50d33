"""The reference: one token after the other."""

import jax
import jax.numpy as jnp
from jax import lax


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
  """See `api.kv_write`. Cost: T sequential updates."""

  def stored(pages: jax.Array, values: jax.Array) -> jax.Array:
    flat = pages.reshape(-1, *pages.shape[2:])

    def step(t: jax.Array, flat: jax.Array) -> jax.Array:
      at = first_slot + jnp.minimum(slot_mapping[t], num_slots - 1)
      kept = jnp.where(slot_mapping[t] < num_slots, values[t], flat[at])
      return lax.dynamic_update_index_in_dim(flat, kept, at, 0)

    return lax.fori_loop(0, len(values), step, flat).reshape(pages.shape)

  return stored(k_pages, k), stored(v_pages, v)
