"""Every implementation of kv_write against a loop in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.kv_write import IMPLEMENTATIONS, kv_write, mosaic_gpu

PAGE_SIZE, LAYER_PAGES, LAYERS = 16, 4, 3
NUM_SLOTS = PAGE_SIZE * LAYER_PAGES


def _case(tokens, dtype, seed=0):
  rng = np.random.default_rng(seed)
  pools = rng.standard_normal((2, LAYERS * LAYER_PAGES, PAGE_SIZE, 2, 64)).astype(dtype)
  new = rng.standard_normal((2, tokens, 2, 64)).astype(dtype)
  real = -(-2 * tokens // 3)
  slots = rng.permutation(NUM_SLOTS)[:real]
  padding = NUM_SLOTS + np.arange(tokens - real)
  return pools, new, np.concatenate([slots, padding]).astype(np.int32)


def _expected(pools, new, slots, layer):
  flat = pools.reshape(2, -1, *pools.shape[3:]).copy()
  for t, slot in enumerate(slots):
    if slot < NUM_SLOTS:
      flat[:, layer * NUM_SLOTS + slot] = new[:, t]
  return flat.reshape(pools.shape)


def _call(implementation):
  if implementation != "mosaic_gpu":
    return lambda *args, **options: kv_write(*args, **options, implementation=implementation)
  if not compat.HAS_INTERPRETER:
    pytest.skip("needs the interpreter of Mosaic GPU kernels: jax 0.11 or newer")
  return lambda *args, **options: mosaic_gpu.kv_write(
    *args, **options, interpret=compat.interpreter()
  )


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("layer", [0, 2])
def test_tokens_land_in_their_slots_and_padding_nowhere(layer, tokens, implementation):
  pools, new, slots = _case(tokens, np.float16)
  out = _call(implementation)(
    *map(jnp.asarray, (*pools, *new)), slot_mapping=jnp.asarray(slots),
    first_slot=layer * NUM_SLOTS, num_slots=NUM_SLOTS,
  )  # fmt: skip
  np.testing.assert_array_equal(np.stack(out), _expected(pools, new, slots, layer))


def test_a_token_whose_bytes_do_not_align_is_refused():
  shape = jnp.zeros((4, 16, 1, 24), jnp.bfloat16)
  new = jnp.zeros((2, 1, 24), jnp.bfloat16)
  with pytest.raises(NotImplementedError, match="1 heads of 24 bfloat16"):
    kv_write(
      shape, shape, new, new, slot_mapping=jnp.arange(2), num_slots=64, implementation="mosaic_gpu"
    )


@pytest.mark.parametrize(
  "change, message",
  [
    ({"k": (3, 2, 32)}, "do not fit pages"),
    ({"slot_mapping": (4,)}, "slot_mapping"),
  ],
)
def test_shapes_that_do_not_fit_raise(change, message):
  shapes = {
    "k_pages": (4, 16, 2, 64), "v_pages": (4, 16, 2, 64), "k": (3, 2, 64), "v": (3, 2, 64),
    "slot_mapping": (3,),
  } | change  # fmt: skip
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(
      lambda arrays: kv_write(**arrays, num_slots=64),
      {name: jax.ShapeDtypeStruct(dims, jnp.float32) for name, dims in shapes.items()},
    )


def test_dtypes_must_agree():
  pages, new = jnp.zeros((4, 16, 2, 64), jnp.float16), jnp.zeros((2, 2, 64), jnp.float32)
  with pytest.raises(ValueError, match="must agree"):
    kv_write(pages, pages, new, new, slot_mapping=jnp.arange(2), num_slots=64)
