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

from jaxserve.config import PlanShape, SchedulerConfig
from jaxserve.pytree import pack, pytree_dataclass, unpack
from jaxserve.sched import ahead, lifecycle, limits, step
from jaxserve.types import Decision, SchedulerParams, SchedulerState


@pytree_dataclass
class PackedState:
  """A `SchedulerState` in few arrays: three, or nine with a prefix cache.

  numbers: i32[.], every other field end to end.
  large: the block tables, the arrays of the pool, and the digests, by name.
  """

  numbers: jax.Array
  large: dict[str, jax.Array]


def _large_fields(state: SchedulerState) -> dict[str, Any]:
  large = {name: x for name, x in vars(state.pool).items() if x.ndim}
  large["block_tables"] = state.block_tables
  if state.reuse is not None:
    large["page_digests"] = state.reuse.digests
  return large


def _with_large(state: SchedulerState, large: dict[str, Any]) -> SchedulerState:
  names = {field.name for field in dataclasses.fields(state.pool)} & set(large)
  state = dataclasses.replace(
    state,
    block_tables=large["block_tables"],
    pool=dataclasses.replace(state.pool, **{name: large[name] for name in names}),
  )
  if state.reuse is None:
    return state
  reuse = dataclasses.replace(state.reuse, digests=large["page_digests"])
  return dataclasses.replace(state, reuse=reuse)


def pack_state(state: SchedulerState) -> PackedState:
  """See `PackedState`."""
  large = _large_fields(state)
  small = _with_large(state, dict.fromkeys(large, jnp.zeros(0, jnp.int32)))
  return PackedState(numbers=pack(small), large=large)


def unpack_state(packed: PackedState, config: SchedulerConfig) -> SchedulerState:
  """The inverse of `pack_state`."""
  return _with_large(small_fields(packed.numbers, config), packed.large)


def small_fields(numbers: Any, config: SchedulerConfig) -> SchedulerState:
  """The state without its large arrays, from `PackedState.numbers` on the device or the host."""
  return unpack(numbers, small_like(config))


@functools.cache
def small_like(config: SchedulerConfig) -> SchedulerState:
  """Shapes and dtypes of what `PackedState.numbers` holds; traces once for each config."""
  like = jax.eval_shape(lambda: lifecycle.init(config))
  nothing = jax.ShapeDtypeStruct((0,), jnp.int32)
  return _with_large(like, dict.fromkeys(_large_fields(like), nothing))


def decision_like(config: SchedulerConfig) -> Decision:
  """Shapes and dtypes of a decision, without tracing `step.schedule`."""
  requests = (config.max_requests,)

  def like(shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)

  return Decision(
    order=like((config.max_num_seqs,)),
    num_scheduled=like(()),
    num_tokens=like(()),
    tokens=like(requests),
    start=like(requests),
    new_pages=like(requests),
    admitted=like(requests, jnp.bool_),
    preempted=like(requests, jnp.bool_),
    samples=like(requests, jnp.bool_),
    arrival=like(requests),
    cached=like(requests) if config.prefix_cache else None,
    evicted=like(()) if config.prefix_cache else None,
    drafts=like(requests) if config.max_drafts else None,
  )


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


def schedule_ahead(
  state: PackedState, params: jax.Array, config: SchedulerConfig, shape: PlanShape, most: int
) -> tuple[PackedState, jax.Array, jax.Array, jax.Array]:
  """`ahead.schedule_ahead` on packed records."""
  swept = unpack(params, params_like(config))
  new, number, decisions, plans = ahead.schedule_ahead(
    unpack_state(state, config), swept, config, shape, most
  )
  return pack_state(new), number, decisions, plans


def commit(
  state: PackedState, decision: jax.Array, stopped: jax.Array, *more: jax.Array,
  config: SchedulerConfig,
) -> tuple[PackedState, jax.Array]:  # fmt: skip
  """`lifecycle.commit` on packed records.

  `more` is its `digests` where there is a prefix cache, then, with speculation, its `outputs` and
  `proposed` as one i32[2, Q].
  """
  given: dict[str, jax.Array] = {}
  rest = list(more)
  if config.prefix_cache and rest:
    given["digests"] = rest.pop(0)
  if config.max_drafts and rest:
    given["outputs"], given["proposed"] = rest.pop(0)
  unpacked = unpack(decision, decision_like(config))
  new, finished = lifecycle.commit(unpack_state(state, config), unpacked, stopped, **given)
  return pack_state(new), finished


def call(
  fn: Callable[..., Any], state: PackedState, *args: Any, config: SchedulerConfig, **options: Any
) -> Any:
  """`fn(state, *args, **options)` on packed states; it returns a state, or a tuple that has one."""
  result = fn(unpack_state(state, config), *args, **options)
  if isinstance(result, SchedulerState):
    return pack_state(result)
  return (pack_state(result[0]), *result[1:])
