"""Scheduler records as few arrays, for calls that should cost little.

Every array of a jitted call costs about 2 us on its way in and out, and a `SchedulerState` has 17.
So what is called once a step is compiled on packed records: the small fields end to end in one
int32 array, the large ones beside it. Packing is a copy of a few kilobytes inside the call.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import SchedulerConfig
from jaxserve.pytree import pack, pytree_dataclass, unpack
from jaxserve.sched import lifecycle, limits, step
from jaxserve.types import Decision, SchedulerParams, SchedulerState


@pytree_dataclass
class PackedState:
  """A `SchedulerState` in three arrays.

  numbers: i32[.], every other field end to end.
  block_tables: i32[Q, M].
  free_pages: i32[N].
  """

  numbers: jax.Array
  block_tables: jax.Array
  free_pages: jax.Array


def pack_state(state: SchedulerState) -> PackedState:
  """See `PackedState`."""
  small = dataclasses.replace(
    state,
    block_tables=jnp.zeros(0, jnp.int32),
    pool=dataclasses.replace(state.pool, free_pages=jnp.zeros(0, jnp.int32)),
  )
  return PackedState(
    numbers=pack(small), block_tables=state.block_tables, free_pages=state.pool.free_pages
  )


def unpack_state(packed: PackedState, config: SchedulerConfig) -> SchedulerState:
  """The inverse of `pack_state`."""
  state = small_fields(packed.numbers, config)
  pool = dataclasses.replace(state.pool, free_pages=packed.free_pages)
  return dataclasses.replace(state, block_tables=packed.block_tables, pool=pool)


def small_fields(numbers: Any, config: SchedulerConfig) -> SchedulerState:
  """The state without its large arrays, from `PackedState.numbers` on the device or the host."""
  return unpack(numbers, small_like(config))


@functools.cache
def small_like(config: SchedulerConfig) -> SchedulerState:
  """Shapes and dtypes of what `PackedState.numbers` holds; traces once for each config."""
  like = jax.eval_shape(lambda: lifecycle.init(config))
  nothing = jax.ShapeDtypeStruct((0,), jnp.int32)
  pool = dataclasses.replace(like.pool, free_pages=nothing)
  return dataclasses.replace(like, block_tables=nothing, pool=pool)


def decision_like(config: SchedulerConfig) -> Decision:
  """Shapes and dtypes of a decision."""
  return jax.eval_shape(
    lambda: step.schedule(lifecycle.init(config), limits.make_params(config), config)
  )[1]


def params_like(config: SchedulerConfig) -> SchedulerParams:
  """Shapes and dtypes of scheduler parameters."""
  return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, limits.make_params(config)))


def pack_params(params: SchedulerParams) -> np.ndarray:
  """i32[6 + hyper-parameters], on the host; the bits of those that are floats."""
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
  return np.asarray(
    [leaf.view(np.int32) if leaf.dtype == np.float32 else leaf for leaf in leaves], np.int32
  )


def schedule(
  state: PackedState, params: jax.Array, config: SchedulerConfig
) -> tuple[PackedState, jax.Array]:
  """`step.schedule` on packed records; the decision packed, for `unpack` and `commit`."""
  swept = unpack(params, params_like(config))
  new, decision = step.schedule(unpack_state(state, config), swept, config)
  return pack_state(new), pack(decision)


def commit(
  state: PackedState, decision: jax.Array, stopped: jax.Array, config: SchedulerConfig,
  counts: jax.Array | None = None,
) -> tuple[PackedState, jax.Array]:  # fmt: skip
  """`lifecycle.commit` on packed records; `counts` i32[2, Q] is its `outputs` and `proposed`."""
  unpacked = unpack(decision, decision_like(config))
  outputs, proposed = (None, None) if counts is None else counts
  new, finished = lifecycle.commit(
    unpack_state(state, config), unpacked, stopped, outputs, proposed
  )
  return pack_state(new), finished


def call(fn: Callable[..., Any], state: PackedState, *args: Any, config: SchedulerConfig) -> Any:
  """`fn(state, *args)`, which returns a state or a tuple that starts with one, on packed states."""
  result = fn(unpack_state(state, config), *args)
  if isinstance(result, SchedulerState):
    return pack_state(result)
  return (pack_state(result[0]), *result[1:])
