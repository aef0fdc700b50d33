"""Admission with a prefix cache: one newcomer after the other, since each may share with the last.

  need_i     min(what is asked for, known_i - start_i), start_i by the hit of `reuse.find_hit`
  pages      those of a prompt less the hit; a page of the hit that nobody held counts as taken

Seats, budget, pages, watermark and `SchedulerConfig.reserve` are as in `rules.admit`, whose closed
form this equals where nothing is hit.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pytree import pytree_dataclass
from jaxserve.sched import reuse
from jaxserve.sched.policy import Context, Draft

Cap = Callable[[jax.Array, Context], jax.Array]
"""Most tokens of a step, i32[], by tokens computed, i32[]."""


@pytree_dataclass
class _Line:
  """The queue, as far as it was looked at.

  lane: i32[], the next one.
  open: bool[], nobody was refused yet.
  seats: i32[], taken.
  used: i32[], pages handed out to newcomers, and those of their hits that nobody held.
  promised: i32[], the same for their whole prompts.
  full: i32[Q], pages that each has full after this step.
  draft: with the newcomers in it.
  """

  lane: jax.Array
  open: jax.Array
  seats: jax.Array
  used: jax.Array
  promised: jax.Array
  full: jax.Array
  draft: Draft


def admit(
  draft: Draft, context: Context, pages: str, whole: bool, only_if_idle: bool, cap: Cap | None
) -> Draft:
  """See `rules.admit`, which calls this. Cost: that of `reuse.find_hit` for each newcomer."""
  state, config, page_size = context.state, context.config, context.config.cache.page_size
  candidate = draft.waiting & ~draft.idle
  stays = draft.running & ~draft.preempted
  closed = jnp.any(draft.preempted)
  if only_if_idle:
    closed |= jnp.any(draft.running)
  promised = -(-draft.known // page_size) - draft.held - draft.pages
  promised = jnp.where(draft.running & ~draft.idle, jnp.maximum(promised, 0), 0)
  line = _Line(
    lane=jnp.argmax(candidate).astype(jnp.int32),
    open=jnp.any(candidate) & ~closed,
    seats=jnp.sum(stays, dtype=jnp.int32),
    used=jnp.zeros((), jnp.int32),
    promised=jnp.sum(promised, dtype=jnp.int32),
    full=jnp.where(stays, (draft.computed + draft.tokens) // page_size, 0),
    draft=draft,
  )
  first = state.reuse.digests.at[draft.request, 0].get(mode="clip")
  end = jnp.sum(draft.request < config.max_requests, dtype=jnp.int32)

  def more(line: _Line) -> jax.Array:
    room = (line.seats < context.params.max_num_seqs) & (line.draft.budget > 0)
    return line.open & (line.lane < end) & room

  def ask(line: _Line) -> _Line:
    hit = reuse.find_hit(line.lane, line.draft, context, line.full, first)
    return _consider(line, hit, candidate[line.lane], context, pages, whole, cap)

  line = lax.while_loop(more, ask, line)
  return dataclasses.replace(line.draft, free=draft.free - line.used)


def _consider(
  line: _Line, hit: reuse.Hit, candidate: jax.Array, context: Context, pages: str, whole: bool,
  cap: Cap | None,
) -> _Line:  # fmt: skip
  """Admits the next in line, or ends the admission of this step."""
  params, config, draft, lane = context.params, context.config, line.draft, line.lane
  page_size, known = config.cache.page_size, draft.known[lane]
  start = jnp.minimum(hit.pages * page_size, known - 1)
  start = jnp.where(hit.pages > 0, start, 0)
  need = jnp.minimum(draft.need[lane], known - start)
  if cap is not None:
    need = jnp.minimum(need, cap(start, context))
  tokens = jnp.minimum(need, draft.budget)
  given = -(-(start + tokens) // page_size) - hit.pages
  prompt = jnp.asarray(config.pages_per_request) if pages == "limit" else -(-known // page_size)
  prompt = prompt - hit.pages
  if pages != "chunk":
    given = prompt
  wanted = line.used + hit.unheld + given
  if pages == "chunk" and config.reserve == "growth":
    wanted = line.promised + hit.unheld + prompt
  elif pages == "chunk" and config.reserve == "gate":
    wanted = line.used + hit.unheld + prompt
  seats = line.seats + 1
  spare = jnp.where(seats > 1, params.watermark_pages, 0)
  ok = (tokens > 0) & (seats <= params.max_num_seqs) & (wanted + spare <= draft.free)
  entire = (tokens == need) | (need > params.budget)
  ok &= entire if whole else (params.chunked_prefill | entire)
  enters = candidate & ok

  def put(field: jax.Array, value: jax.Array | bool) -> jax.Array:
    return field.at[lane].set(jnp.where(enters, value, field[lane]))

  def add(total: jax.Array, more: jax.Array | int) -> jax.Array:
    return total + jnp.where(enters, more, 0)

  hits = hit.pages > 0
  draft = dataclasses.replace(
    draft,
    tokens=put(draft.tokens, tokens),
    pages=put(draft.pages, given),
    admitted=put(draft.admitted, True),
    computed=put(draft.computed, jnp.where(hits, start, draft.computed[lane])),
    held=put(draft.held, hit.pages),
    hits=put(draft.hits, hit.pages),
    source=put(draft.source, hit.source),
    budget=draft.budget - jnp.where(enters, tokens, 0),
  )
  return _Line(
    lane=lane + 1,
    open=line.open & (ok | ~candidate),
    seats=add(line.seats, 1),
    used=add(line.used, given + hit.unheld),
    promised=add(line.promised, prompt + hit.unheld),
    full=put(line.full, (start + tokens) // page_size),
    draft=draft,
  )
