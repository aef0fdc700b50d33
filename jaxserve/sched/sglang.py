"""SGLang's scheduling round as one rule: prefill first, one prompt at a time in chunks.

  a step      a prefill batch if one can be formed, else every decode; mixed: both in one
  chunk       the request in the chunk slot takes min(need, c), then the head of the waiting queue
              enters while c lasts, in whole pages; the last is cut and has the chunk slot
  memory      a newcomer must fit beside ratio * (outputs that the running may still produce)
  ratio       falls with every decode step, jumps at a retraction, starts again when idle
  retraction  fewest outputs first, then the longest prompt, then the latest; to the queue's tail

The batch has a closed form (`sglang_prefill`); only the victims of a retraction are found one after
the other. `tests/testing/sglang_oracle.py` has the same round as plain loops.

Source: SGLang, `Scheduler.get_next_batch_to_run`, `ScheduleBatch.retract_decode`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sched.policy import Context, Draft, Rule
from jaxserve.sched.rules import ceil_div, prefix_sum
from jaxserve.sched.sglang_prefill import prefill_batch
from jaxserve.sched.sglang_round import MEMBER, MOST_TOKENS, ROW, Memory, Round, fold, init, units
from jaxserve.types import Status


class _Decode(NamedTuple):
  tokens: jax.Array  # i32[Q]
  rank: jax.Array  # i32[Q], 1 for the first victim; 0 for who stays
  ratio: jax.Array  # i32[]


def sglang(*, mixed: bool = False) -> Rule:
  """SGLang's round; memory: `Memory`.

  Args:
    mixed: decodes ride in the prefill batch, `--enable-mixed-chunk`.

  Cost: O(Q), and O(Q) for each request retracted.
  """

  def apply(draft: Draft, memory: Memory, context: Context) -> tuple[Draft, Memory]:
    now = fold(draft, memory, context)
    prefill, decode = prefill_batch(draft, now, mixed), _decode(draft, now)
    formed = jnp.any(prefill.tokens > 0)
    if mixed:
      riding = jnp.where(formed & now.active, 1, 0)
      prefill = prefill._replace(tokens=prefill.tokens + riding)
    tokens = jnp.where(formed, prefill.tokens, decode.tokens)
    rank = jnp.where(formed, 0, decode.rank)
    shrinks = (now.ghosts > 0) | jnp.any(rank > 0)
    new = Memory(
      chunked=prefill.chunked,
      batch_is_full=prefill.full & (formed | ~shrinks),
      ratio=jnp.where(formed, now.ratio, decode.ratio),
      countdown=jnp.where(
        formed, now.knobs.interval, jnp.maximum(memory.countdown - now.skip.astype(jnp.int32), 0)
      ),
      ghosts=jnp.where(formed & (not mixed), now.ghosts, 0),
      ghost_left=jnp.where(formed & (not mixed), now.ghost_left, 0),
      **_by_slot(draft, now, tokens, rank, formed, prefill.chunked),
    )
    return _carry_out(draft, now, tokens, rank), new

  return Rule(init, apply)


def _decode(draft: Draft, now: Round) -> _Decode:
  """Every decode; where pages lack, requests are retracted until the rest fits."""
  lane = jnp.arange(draft.need.shape[0])
  produced = draft.known - now.prompt
  # The last one is not retracted, unless pages are held by the request in the chunk slot only.
  ending = jnp.any(draft.running & draft.idle)
  least = jnp.where(now.chunking & ~ending, 0, 1)

  def lacks(carry: tuple) -> jax.Array:
    _, free, demand, stay, _ = carry
    return (demand > free) & (stay > least)

  def retract(carry: tuple) -> tuple:
    rank, free, demand, stay, number = carry
    among = now.active & (rank == 0)
    among &= produced == jnp.min(jnp.where(among, produced, MOST_TOKENS))
    among &= now.prompt == jnp.max(jnp.where(among, now.prompt, 0))
    victim = lane == jnp.max(jnp.where(among, lane, -1))
    freed, undone = (jnp.sum(jnp.where(victim, x, 0)) for x in (draft.held, now.demand))
    rank = jnp.where(victim, number, rank)
    return rank, free + freed, demand - undone, stay - 1, number + 1

  demand = jnp.sum(now.demand)
  carry = jnp.zeros_like(draft.need), draft.free, demand, jnp.sum(now.active, dtype=jnp.int32), 1
  rank, free, rest, _, _ = lax.while_loop(lacks, retract, carry)
  stay, retracted = now.members & (rank == 0), jnp.any(rank > 0)
  columns = jnp.stack([produced + now.knobs.retract_steps, now.max_new])
  outputs, most = jnp.sum(jnp.where(stay[None], columns, 0), axis=1)
  estimate = units(jnp.minimum(outputs.astype(jnp.float32) / (most + 1).astype(jnp.float32), 1.0))
  decayed = jnp.maximum(now.ratio - now.knobs.decay, now.knobs.floor)
  ratio = jnp.where(retracted, estimate, jnp.where(demand <= draft.free, decayed, now.ratio))
  return _Decode(
    tokens=jnp.where(now.active & stay & (rest <= free), 1, 0),
    rank=rank,
    ratio=jnp.where(jnp.any(now.members), ratio, now.knobs.first),  # idle
  )


def _by_slot(
  draft: Draft, now: Round, tokens: jax.Array, rank: jax.Array, formed: jax.Array,
  chunked: jax.Array,
) -> dict[str, jax.Array]:  # fmt: skip
  """The fields of `Memory` that are kept by slot, after the step."""
  state = now.context.state
  lane = jnp.arange(draft.need.shape[0], dtype=jnp.int32)
  nobody = lane.shape[0]
  slot = jnp.where(draft.request < nobody, draft.request, nobody + lane)
  marks = jnp.where(rank > 0, -1, tokens)
  marks = jnp.zeros_like(lane).at[slot].set(marks, mode="drop", unique_indices=True)
  served = marks > 0
  stays = (served | (state.status == Status.RUNNING)) & (marks >= 0)
  member = jnp.where(stays & (lane != chunked), MEMBER, 0)
  samples = served & (state.num_computed + marks == state.num_known)
  known = state.num_known + samples.astype(jnp.int32)
  return {
    "role": jnp.where(formed & served, ROW, member),
    "left": jnp.clip(state.max_total - known, 0, now.knobs.clip),
  }


def _carry_out(draft: Draft, now: Round, tokens: jax.Array, rank: jax.Array) -> Draft:
  """The draft with what was decided, pages included."""
  page_size = now.context.config.cache.page_size
  served, retracted = tokens > 0, rank > 0
  pages = jnp.maximum(ceil_div(draft.computed + tokens, page_size) - draft.held, 0)
  pages = jnp.where(served, pages, 0)
  freed = jnp.where(retracted, draft.held, 0)
  return dataclasses.replace(
    draft,
    tokens=tokens,
    pages=pages,
    admitted=served & draft.waiting,
    preempted=retracted,
    budget=draft.budget - jnp.sum(tokens),
    free=draft.free + jnp.sum(freed - pages),
    queue=_requeue(draft, rank) if now.context.config.ordering == "fcfs" else None,
  )


def _requeue(draft: Draft, rank: jax.Array) -> jax.Array:
  """i32[Q]: the queue with the retracted requests behind everybody else, first victim first."""

  def reorder(queue: jax.Array) -> jax.Array:
    lane = jnp.arange(queue.shape[0], dtype=jnp.int32)
    there, victim = queue < queue.shape[0], rank > 0
    kept = jnp.sum(there & ~victim, dtype=jnp.int32)
    place = jnp.where(victim, kept + rank - 1, lane - prefix_sum(victim))
    place = jnp.where(there, place, lane)
    return queue.at[place].set(queue, unique_indices=True)

  return lax.cond(jnp.any(rank > 0), reorder, lambda queue: queue, draft.request)
