"""Several steps of decodes decided at once, for a device that runs them on its own."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.config import PlanShape, SchedulerConfig
from jaxserve.pytree import pack
from jaxserve.sched import step
from jaxserve.sched.layout import lay_out
from jaxserve.types import Decision, SchedulerParams, SchedulerState, Status, pack_plan
from jaxserve.types.plan import packed_size


def schedule_ahead(
  state: SchedulerState, params: SchedulerParams, config: SchedulerConfig, shape: PlanShape,
  most: int,
) -> tuple[SchedulerState, jax.Array, jax.Array, jax.Array]:  # fmt: skip
  """`schedule`, and again as long as only decodes go on, at most `most` times.

  Every decision is the one that `schedule` would make after the one before it, with nothing
  committed between them. The first may be of any kind; the others only decode.

  Args:
    state: not modified.
    params: as for `schedule`.
    config: static; without drafts.
    shape: static, of a bucket of at least config.max_num_seqs tokens.
    most: static, K.

  Returns:
    (state, number i32[], decisions i32[K, .] packed, plans i32[K, .] packed), of which the first
    `number` count; the first plan only if its decision has no more tokens than `shape`.

  Cost: number x (schedule + lay_out).
  Source: vLLM's multi-step scheduling (v0.6), where the pages of all steps were taken beforehand.
  """
  assert shape.num_tokens >= config.max_num_seqs and not config.max_drafts
  like = jax.eval_shape(functools.partial(step.schedule, config=config), state, params)[1]
  size = sum(leaf.size for leaf in jax.tree.leaves(like))

  def go_on(carry: tuple) -> jax.Array:
    return carry[1]

  def body(carry: tuple) -> tuple:
    number, _, state, decisions, plans = carry
    state, decision = step.schedule(state, params, config)
    decisions = decisions.at[number].set(pack(decision))
    plans = plans.at[number].set(pack_plan(lay_out(state, decision, shape)))
    number = number + 1
    return number, (number < most) & decodes_go_on(state, decision), state, decisions, plans

  decisions = jnp.zeros((most, size), jnp.int32)
  plans = jnp.zeros((most, packed_size(shape)), jnp.int32)
  carry = jnp.int32(0), jnp.bool_(True), state, decisions, plans
  number, _, state, decisions, plans = lax.while_loop(go_on, body, carry)
  return state, number, decisions, plans


def decodes_go_on(state: SchedulerState, decision: Decision) -> jax.Array:
  """bool[]: `decision` only decodes, so will the next one, and the host need not see this first.

  The next one has if nobody waits, no running request lacks more than a token, somebody's outputs
  go on, nobody awaits the host, and there is a page for each, so that none is preempted.

  Args:
    state: as returned by `schedule` together with `decision`.
    decision: the last one.
  """
  running = state.status == Status.RUNNING
  scheduled = decision.tokens > 0
  decodes = (decision.tokens == 1) & (decision.start >= state.num_prompt)
  return (
    jnp.any(scheduled)
    & jnp.all(decodes | ~scheduled)
    & ~jnp.any(state.status == Status.WAITING)
    & ~jnp.any(running & (state.num_known - state.num_computed > 1))
    & jnp.any(running & (state.num_known < state.max_total))
    & ~jnp.any(running & state.await_host)
    & (state.pool.num_free >= jnp.sum(running))
  )
