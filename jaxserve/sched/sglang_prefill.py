"""SGLang's prefill batch: the chunk slot first, then the head of the waiting queue.

Candidates are taken whole in order until one is not, so what earlier ones take is a prefix sum and
every verdict is an expression of the lane:

  enters      need + left + S < free - riders - charges - ratio * sum_running(left)   else full
              ceil_S(need) <= c - billed, or cut to floor_S(c - billed) > 0           else stop
  goes on     free - charges > reserved, c - billed > 0, max_prefill - billed > 0     else stop

The batch is the longest prefix that they allow. Source: SGLang, `PrefillAdder`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.sched.policy import Draft
from jaxserve.sched.rules import ceil_div
from jaxserve.sched.sglang_round import Round, whole_pages


class Chunk(NamedTuple):
  """What the request in the chunk slot gets; scalars."""

  tokens: jax.Array
  billed: jax.Array
  charge: jax.Array  # tokens of the pool it is charged
  pages: jax.Array
  ends: jax.Array  # bool[], the prompt is complete
  stalled: jax.Array  # bool[], no page is free for it


class Prefill(NamedTuple):
  """A prefill batch.

  tokens: i32[Q], in order of service; all 0 if none can be formed.
  chunked: i32[], slot of whoever is in the chunk slot afterwards; Q for nobody.
  full: bool[], `Memory.batch_is_full` afterwards.
  """

  tokens: jax.Array
  chunked: jax.Array
  full: jax.Array


def prefill_batch(draft: Draft, now: Round, mixed: bool) -> Prefill:
  """The prefill batch: the chunk slot first, then a prefix of the waiting queue."""
  riders = now.size if mixed else jnp.zeros((), jnp.int32)
  room = draft.free - (jnp.sum(now.demand) if mixed else 0)
  chunk = _continue(draft, now, riders, room)
  tokens, full = _admit(draft, now, chunk, riders, room)
  cut = (tokens > 0) & (tokens < draft.need)
  nobody = now.context.config.max_requests
  chunked = jnp.where(now.chunking & ~chunk.ends, now.chunked, nobody)
  chunked = jnp.minimum(chunked, jnp.min(jnp.where(cut, draft.request, nobody)))
  own = draft.running & (draft.request == now.chunked)
  return Prefill(tokens + jnp.where(own, chunk.tokens, 0), chunked, full)


def _continue(draft: Draft, now: Round, riders: jax.Array, room: jax.Array) -> Chunk:
  """The next tokens of the request in the chunk slot; not cut to pages."""
  state, knobs, page_size = now.context.state, now.knobs, now.context.config.cache.page_size
  known, computed, held, prompt, max_total = (
    field.at[now.chunked].get(mode="fill", fill_value=0)
    for field in (
      state.num_known, state.num_computed, state.num_pages, state.num_prompt, state.max_total
    )
  )  # fmt: skip
  budget = knobs.chunk - riders
  memory = draft.free * page_size - riders - jnp.ceil(now.reserved).astype(jnp.int32)
  limit = jnp.minimum(budget, memory)
  wanted = jnp.minimum(known - computed, jnp.where(limit > 0, limit, budget))
  capacity = (room + held) * page_size - computed
  here = now.chunking & ~now.skip
  tokens = jnp.where(here, jnp.clip(wanted, 0, jnp.maximum(capacity, 0)), 0)
  ends = here & (tokens == known - computed)
  billed = whole_pages(tokens, now.context)
  charge = billed + knobs.overhead + jnp.where(ends, jnp.minimum(max_total - prompt, knobs.clip), 0)
  return Chunk(
    tokens=tokens,
    billed=billed,
    charge=jnp.where(tokens > 0, charge, 0),
    pages=jnp.maximum(ceil_div(computed + tokens, page_size) - held, 0),
    ends=ends,
    stalled=here & ((tokens < wanted) | (tokens == 0)),
  )


def _admit(
  draft: Draft, now: Round, chunk: Chunk, riders: jax.Array, room: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(tokens of newcomers i32[Q], batch_is_full): head of line, until a verdict says stop."""
  knobs, params, page_size = now.knobs, now.context.params, now.context.config.cache.page_size
  candidate, need = draft.waiting & ~draft.idle, draft.need
  lane = jnp.arange(need.shape[0])
  whole = whole_pages(need, now.context)
  place, real, billed, charged = now.sums  # up to and with the candidate
  earlier = place - 1
  before = earlier + now.chunking.astype(jnp.int32)  # rows of the batch
  alone = (now.size == 0) & ~now.chunking
  head = alone & (earlier == 0)
  # Verdicts before it is taken.
  used = jnp.sum(draft.running, dtype=jnp.int32)
  seats = params.max_num_seqs - jnp.maximum(now.size, used)
  charge = whole + knobs.overhead + jnp.minimum(now.max_new, knobs.clip)
  total = draft.free * page_size - riders - chunk.charge - (charged - charge)
  margin = total - need - now.left - knobs.overhead
  bill = chunk.billed + (billed - whole)  # of whoever is before it
  input_left = knobs.max_prefill - riders - bill
  chunk_left = jnp.where(
    knobs.chunking, knobs.chunk - riders - bill,
    knobs.chunk - riders - chunk.tokens - (real - need),
  )  # fmt: skip
  fits = jnp.where(knobs.chunking, whole, need) <= chunk_left
  rest = jnp.where(head, chunk_left, 0)
  cut = jnp.where(knobs.chunking, chunk_left // knobs.unit * knobs.unit, rest)
  tokens = jnp.where(fits, need, jnp.minimum(need, cut))
  pages = ceil_div(bill - chunk.billed + tokens, page_size) + chunk.pages
  spare = jnp.where(alone, 0, params.watermark_pages)
  seated, affords = before < seats, (now.reserved < margin.astype(jnp.float32)) | head
  ok = seated & affords & (tokens > 0) & (pages + spare <= room)
  ok &= ~(knobs.gate & (before > 0) & (whole >= input_left))
  # Verdicts after it.
  own_bill = whole_pages(tokens, now.context)
  complete = tokens == need
  own = own_bill + knobs.overhead + jnp.where(complete, charge - whole - knobs.overhead, 0)
  current = draft.free * page_size - riders - bill - own_bill - knobs.overhead * (before + 1)
  no_token = (now.reserved >= (total - own).astype(jnp.float32)) | (current <= 0)
  other = (input_left <= own_bill) | (knobs.chunking & (chunk_left <= own_bill))
  # The longest prefix that they allow.
  nobody = lane.shape[0]
  refused = jnp.min(jnp.where(candidate & ~ok, lane, nobody))
  last = jnp.min(jnp.where(candidate & (no_token | other), lane, nobody))
  opened = ~now.skip & jnp.where(now.chunking, ~chunk.stalled, ~(now.full & (now.size > 0)))
  taken = candidate & (lane < jnp.where(opened, jnp.minimum(refused, last + 1), 0))
  # Whoever follows one that was cut is measured by what that one takes, not by its whole prompt.
  excess = jnp.sum(jnp.where(taken & ~complete, charge - own, 0))
  lacks = ~seated | ~((now.reserved < (margin + excess).astype(jnp.float32)) | head)
  fills = jnp.where(
    refused <= last, (lane == refused) & lacks & candidate, (lane == last) & no_token
  )
  return jnp.where(taken, tokens, 0), now.full | (opened & jnp.any(fills))
