"""The default policy: a unified token budget (vLLM V1, first come first served or by priority).

Running requests draw from the budget first, in order of service, then the head of the waiting
queue. That order is all that "decode first" means; the clamp to what is left is all that chunked
prefill means. Both passes have a closed form, so there is no loop over requests:

  grants       g_i = clip(budget - sum_{j<i} need_j, 0, need_i)
  page demand  d_i = max(ceil((computed_i + g_i) / S) - held_i, 0)
  survivors    the first n running requests, n the largest with
               sum_{j<n} d_j <= free + sum_{j>=n} held_j
  admitted     the longest prefix of the waiting queue that budget, seats and pages allow;
               nobody in a step that preempts

Victims are the tail of the running order, so nobody already served is taken back.
"""

import jax
import jax.numpy as jnp

from jaxserve.config import SchedulerConfig
from jaxserve.pytree import pytree_dataclass
from jaxserve.types import SchedulerParams, SchedulerState, Status


@pytree_dataclass
class Grants:
  """What a policy decides, in order of service. The mechanism in `step` carries it out.

  request: i32[Q], running requests, then waiting ones, then Q.
  tokens: i32[Q], granted; 0 = not scheduled.
  pages: i32[Q], to be handed out.
  admitted: bool[Q].
  preempted: bool[Q].
  """

  request: jax.Array
  tokens: jax.Array
  pages: jax.Array
  admitted: jax.Array
  preempted: jax.Array


def decide(state: SchedulerState, params: SchedulerParams, config: SchedulerConfig) -> Grants:
  """One step of the unified token budget.

  Sequential oracle: tests/testing/oracle.py. Deviates from vLLM V1: victims are chosen before
  anyone is served; under "priority" the same key orders service and victims; a refused admission
  never depends on who was examined before it; `reserve="growth"` keeps room for prompts already
  admitted. `SchedulerConfig.reserve="gate"` gives vLLM's admission.

  Cost: O(Q), two cumulative sums, no sort.
  """
  page_size, num_requests = config.cache.page_size, config.max_requests
  request = _service_order(state, config)

  def take(field: jax.Array) -> jax.Array:
    return field.at[request].get(mode="fill", fill_value=0)

  status, known, computed = take(state.status), take(state.num_known), take(state.num_computed)
  held = take(state.num_pages)
  running, waiting = status == Status.RUNNING, status == Status.WAITING
  # All outputs are scheduled, or the next input is still on its way: sits this step out.
  idle = (known >= take(state.max_total)) | (
    take(state.await_host) & (take(state.num_in_flight) > 0)
  )
  need = _need(known, computed, running | waiting, idle, params)
  tokens = jnp.clip(params.budget - (_prefix_sum(need) - need), 0, need)

  demand = jnp.maximum(_ceil_div(computed + tokens, page_size) - held, 0)
  demand = jnp.where(tokens > 0, demand, 0)
  whole = jnp.where(idle, 0, jnp.maximum(_ceil_div(known, page_size) - held, 0))
  candidate = waiting & ~idle
  sums = _prefix_sum(jnp.stack([demand, whole, jnp.where(running, held, 0), _i32(candidate)]))
  demand_sum, whole_sum, held_sum, place = sums
  free = state.pool.num_free
  fits = demand_sum <= free + held_sum[-1] - held_sum
  preempted = running & ~fits

  seats = jnp.sum(running, dtype=jnp.int32) + place
  wanted = {
    "growth": whole_sum,
    "gate": demand_sum - demand + whole,
    "none": demand_sum,
  }[config.reserve]
  spare = jnp.where(seats > 1, params.watermark_pages, 0)
  ok = (tokens > 0) & (params.chunked_prefill | (tokens == need))
  ok &= (seats <= params.max_num_seqs) & (wanted + spare <= free)
  refused = jnp.where(candidate & ~ok, jnp.arange(num_requests), num_requests)
  first_refused = jnp.where(jnp.any(preempted), 0, jnp.min(refused))
  admitted = candidate & (jnp.arange(num_requests) < first_refused)

  served = (running & ~preempted) | admitted
  return Grants(
    request=request,
    tokens=jnp.where(served, tokens, 0),
    pages=jnp.where(served, demand, 0),
    admitted=admitted,
    preempted=preempted,
  )


def _need(
  known: jax.Array, computed: jax.Array, accepted: jax.Array, idle: jax.Array,
  params: SchedulerParams,
) -> jax.Array:  # fmt: skip
  """i32[Q]: tokens each request asks for in this step, capped by the long-prefill threshold."""
  need = jnp.where(accepted & ~idle, known - computed, 0)
  alone = jnp.sum(accepted, dtype=jnp.int32) == 1
  threshold = params.long_prefill_token_threshold
  capped = (threshold > 0) & (params.cap_when_alone | ~alone)
  return jnp.where(capped, jnp.minimum(need, threshold), need)


def _service_order(state: SchedulerState, config: SchedulerConfig) -> jax.Array:
  """i32[Q]: running requests, then waiting ones, each in queue order; then Q.

  Under FCFS that is the queue itself: admission takes a prefix of it and preemption a suffix of
  what runs, so the running requests always stand in front.
  """
  if config.ordering == "fcfs":
    return state.queue
  num_requests = config.max_requests
  status = state.status.at[state.queue].get(mode="fill", fill_value=Status.FREE)
  kinds = jnp.stack([status == Status.RUNNING, status == Status.WAITING])
  sums = _prefix_sum(kinds)
  place = jnp.where(kinds[0], sums[0] - 1, sums[0, -1] + sums[1] - 1)
  lane = jnp.arange(num_requests, dtype=jnp.int32)
  place = jnp.where(kinds[0] | kinds[1], place, num_requests + lane)
  order = jnp.full(num_requests, num_requests, jnp.int32)
  return order.at[place].set(state.queue, mode="drop", unique_indices=True)


def _prefix_sum(x: jax.Array) -> jax.Array:
  return jnp.cumsum(x, axis=-1, dtype=jnp.int32)


def _i32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.int32)


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
  return (a + (b - 1)) // b
