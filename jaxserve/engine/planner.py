"""The scheduler's device: the state of the scheduler, and the programs that use it."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.engine import devices
from jaxserve.engine.config import EngineConfig, bucket_for
from jaxserve.engine.executables import ExecutableTable
from jaxserve.pytree import unpacker
from jaxserve.sched import packing
from jaxserve.types import Decision, SchedulerParams, cut_plan, plan_parts, unpack_plan


class Decided(NamedTuple):
  """A step of any kind, or several of decodes alone that go to the device together.

  Attributes:
    packed: decisions, for `Planner.commit`.
    decisions: the same on the host.
    bucket: T; 0 if the only step has no tokens.
    plan: packed, on the host; of several steps [K, .], of which the first ones count. None without
      tokens.
    small_plan: of a single step in the shape of the smallest bucket, for a draft model; else None.
  """

  packed: Sequence[jax.Array | np.ndarray]
  decisions: Sequence[Decision]
  bucket: int = 0
  plan: np.ndarray | None = None
  small_plan: np.ndarray | None = None


class Planner:
  """Keeps the scheduler's state under one policy at a time."""

  def __init__(self, config: EngineConfig, table: ExecutableTable, where: devices.Devices):
    self._config, self._table, self._devices = config, table, where
    self._schedulers = {shapes.policy: shapes for shapes in config.schedulers}
    self._unpack = {
      policy: unpacker(packing.decision_like(shapes)) for policy, shapes in self._schedulers.items()
    }
    self._parts = {
      (laid_out, bucket): plan_parts(config.plan_shape(laid_out), config.plan_shape(bucket))
      for laid_out in {*config.layouts, config.decode_buckets[-1]}
      for bucket in config.buckets
      if bucket <= laid_out
    }
    nobody = np.zeros(config.scheduler.max_requests, bool)
    self._nobody = jax.device_put(nobody, where.scheduler)
    for shapes in config.schedulers:
      packing.small_like(shapes)  # traces, so before compiles are counted
    self.set_policy(config.scheduler.policy)

  @property
  def policies(self) -> tuple[Hashable, ...]:
    """Those that it was built for."""
    return tuple(self._schedulers)

  @property
  def num_free_pages(self) -> int:
    """Pages that nobody holds."""
    numbers = np.asarray(self._state.numbers)
    return int(packing.small_fields(numbers, self.shapes).pool.num_free)

  def set_policy(self, policy: Hashable) -> None:
    """Goes on under one of `policies`, with an empty state."""
    self.policy, self.shapes = policy, self._schedulers[policy]
    self.clear()

  def set_params(self, params: SchedulerParams) -> None:
    """From the next step on."""
    self._params = jax.device_put(packing.pack_params(params), self._devices.scheduler)

  def clear(self) -> None:
    """Forgets all requests and what pages hold."""
    self._state = self._table["init", self.policy](np.int32(0))

  def submit(
    self, num_prompt: int, limit: int, priority: int, await_host: bool, reuse: tuple[Any, ...]
  ) -> int:
    """`sched.submit`: the slot, max_requests if there is none. `reuse` is of the prefix cache."""
    self._state, slot = self._table["submit", self.policy](
      self._state, np.int32(num_prompt), np.int32(limit), np.int32(priority),
      np.bool_(await_host), *reuse,
    )  # fmt: skip
    return int(slot)

  def abort(self, slots: Sequence[int]) -> None:
    """`sched.abort`."""
    self._state = self._table["abort", self.policy](self._state, self._mask(slots))

  def decide(self) -> Decided:
    """The next step, or several if the config allows it and they only decode."""
    if self._config.decode_steps > 1:
      return self._decide_ahead()
    return self._one(self.schedule())

  def _decide_ahead(self) -> Decided:
    self._state, number, packed, plans = self._table["schedule_ahead", self.policy](
      self._state, self._params
    )
    count, several = int(number), np.asarray(packed)
    if count == 1:
      return self._one(several[0])
    decisions = [self._unpack[self.policy](one) for one in several[:count]]
    bucket = bucket_for(int(decisions[0].num_tokens), self._config.decode_buckets)
    plan = self._decode_plans(np.asarray(plans), bucket)
    return Decided(list(several[:count]), decisions, bucket, plan)

  def _one(self, packed: jax.Array | np.ndarray) -> Decided:
    decision = self._unpack[self.policy](np.asarray(packed))
    if int(decision.num_tokens) == 0:
      return Decided([packed], [decision])
    bucket = bucket_for(int(decision.num_tokens), self._config.buckets)
    plan, small = self.plan(packed, bucket), None
    if self._config.draft_model:
      small = self.plan(packed, self._config.buckets[0])
    return Decided([packed], [decision], bucket, plan, small)

  def schedule(self) -> jax.Array:
    """`sched.schedule`: the decision, packed."""
    self._state, packed = self._table["schedule", self.policy](self._state, self._params)
    return packed

  def plan(self, decision: jax.Array | np.ndarray, bucket: int) -> np.ndarray:
    """The packed plan of the last decision, on the host: a call takes it along to its device."""
    tokens = bucket_for(bucket, self._config.layouts)
    packed = np.asarray(self._table["lay_out", tokens, self.policy](self._state, decision))
    return cut_plan(packed, self._parts[tokens, bucket])

  def idle_decode_plans(self, empty: jax.Array, bucket: int) -> np.ndarray:
    """Packed plans of decodes of which the first runs and computes nothing, from an empty decision.

    It names a request, or nothing would be run, and samples nothing.
    """
    tokens = self._config.decode_buckets[-1]
    plan: Any = np.array(self.plan(empty, tokens))
    row_request: Any = unpack_plan(plan, self._config.plan_shape(tokens)).row_request
    row_request[0] = 0  # a view
    return self._decode_plans(np.stack([plan] * self._config.decode_steps), bucket)

  def _decode_plans(self, plans: np.ndarray, bucket: int) -> np.ndarray:
    """Packed plans of the largest bucket of decodes, [K, .], as those of `bucket`."""
    laid_out = self._config.decode_buckets[-1]
    return np.stack([cut_plan(plan, self._parts[laid_out, bucket]) for plan in plans])

  def commit(
    self, decision: jax.Array | np.ndarray, stopped: Sequence[int], *more: np.ndarray
  ) -> set[int]:
    """`sched.commit`: the slots of requests that have finished. `more` as `packing.commit`."""
    self._state, finished = self._table["commit", self.policy](
      self._state, decision, self._mask(stopped), *more
    )
    return set(np.asarray(finished).nonzero()[0].tolist())

  def _mask(self, slots: Sequence[int]) -> jax.Array | np.ndarray:
    if not slots:
      return self._nobody
    mask = np.zeros(self.shapes.max_requests, bool)
    mask[list(slots)] = True
    return mask
