"""What SGLang's policy knows at the start of a round: hyper-parameters, memory, the decode set."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.config import SchedulerConfig
from jaxserve.pytree import pytree_dataclass
from jaxserve.sched.policy import Context, Draft
from jaxserve.sched.rules import ceil_div, prefix_sum
from jaxserve.types import Status

MOST_TOKENS = 1 << 24  # more than any budget
MOST_INTERVAL = 100

# Names and defaults of SGLang, but for the first: as large as the budget.
DEFAULTS = (
  ("chunked_prefill_size", MOST_TOKENS),
  ("max_prefill_tokens", 16384),
  ("prefill_decode_interval", 0),
  ("schedule_conservativeness", 1.0),
  ("init_new_token_ratio", 0.7),
  ("min_new_token_ratio_factor", 0.14),
  ("new_token_ratio_decay_steps", 600),
  ("retract_decode_steps", 20),
  ("clip_max_new_tokens", 4096),
  ("page_overhead", 1),
  ("legacy_rem_input_gate", 0),
)
RANGES = (
  ("chunked_prefill_size", -1, MOST_TOKENS),
  ("max_prefill_tokens", 1, MOST_TOKENS),
  ("prefill_decode_interval", 0, MOST_INTERVAL),
  ("schedule_conservativeness", 0, 100),
  ("init_new_token_ratio", 0, 1),
  ("min_new_token_ratio_factor", 0, 1),
  ("new_token_ratio_decay_steps", 1, MOST_TOKENS),
  ("retract_decode_steps", 0, MOST_TOKENS),
  ("clip_max_new_tokens", 0, MOST_TOKENS),
  ("page_overhead", 0, 1),
  ("legacy_rem_input_gate", 0, 1),
)

ONE = 1 << 30  # the new-token ratio 1.0: whole numbers do not drift over hundreds of decays
MEMBER, ROW = 1, 2  # in the decode set; in the prefill batch of the last step


@pytree_dataclass
class Memory:
  """What SGLang's scheduler remembers from round to round.

  A ghost is a request that has left (finished, aborted) while the decode set still counts it: the
  set is filtered by steps that decode only.

  chunked: i32[], slot of the request whose prompt is partly computed; Q for nobody.
  batch_is_full: bool[], the waiting queue is not looked at until the decode set shrinks.
  ratio: i32[], the new-token ratio in units of 2**-30; negative before the first step.
  countdown: i32[], steps to come that form no prefill batch.
  role: i32[Q], by slot: 1 in the decode set, 2 in the prefill batch of the last step.
  left: i32[Q], by slot: outputs it may still make, clipped.
  ghosts: i32[], how many there are.
  ghost_left: i32[], the sum of their `left`.
  """

  chunked: jax.Array
  batch_is_full: jax.Array
  ratio: jax.Array
  countdown: jax.Array
  role: jax.Array
  left: jax.Array
  ghosts: jax.Array
  ghost_left: jax.Array

  @property
  def new_token_ratio(self) -> jax.Array:
    """f32[]: the part of what running requests may still produce that admission keeps free."""
    return self.ratio.astype(jnp.float32) / ONE


class Knobs(NamedTuple):
  """Hyper-parameters as a round uses them; scalars.

  chunking: bool[], prompts may be cut.
  chunk: i32[], most prompt tokens of one step.
  unit: i32[], a first chunk is a multiple of it.
  max_prefill: i32[], most prompt tokens after which nobody else enters.
  interval: i32[], steps without prefill after each with one.
  first, floor, decay: i32[], new-token ratios, in units of 2**-30.
  retract_steps: i32[], outputs that a retraction foresees for each survivor.
  clip: i32[], most outputs that are reserved.
  overhead: i32[], tokens charged for each newcomer besides its own.
  gate: bool[], max_prefill bars every newcomer but the first.
  """

  chunking: jax.Array
  chunk: jax.Array
  unit: jax.Array
  max_prefill: jax.Array
  interval: jax.Array
  first: jax.Array
  floor: jax.Array
  decay: jax.Array
  retract_steps: jax.Array
  clip: jax.Array
  overhead: jax.Array
  gate: jax.Array


class Round(NamedTuple):
  """A round once the last batch has joined the decode set. Arrays [Q] are in order of service.

  knobs: Knobs.
  context: Context.
  chunked: i32[], slot of the request in the chunk slot; Q for nobody.
  chunking: bool[], somebody is in it.
  full: bool[], `Memory.batch_is_full`.
  ratio: i32[], `Memory.ratio`.
  skip: bool[], the decode interval forbids a prefill batch.
  size: i32[], of the decode set, ghosts included.
  ghosts, ghost_left: i32[], see `Memory`.
  members: bool[Q], the decode set without ghosts.
  active: bool[Q], those of them that decode.
  demand: i32[Q], pages that this takes.
  prompt: i32[Q], prompt tokens.
  max_new: i32[Q], most outputs.
  left: i32[Q], outputs still to come, clipped.
  reserved: f32[], tokens kept for the outputs of the decode set.
  sums: i32[4, Q], up to each candidate: number, tokens, tokens in whole pages, tokens charged.
  """

  knobs: Knobs
  context: Context
  chunked: jax.Array
  chunking: jax.Array
  full: jax.Array
  ratio: jax.Array
  skip: jax.Array
  size: jax.Array
  ghosts: jax.Array
  ghost_left: jax.Array
  members: jax.Array
  active: jax.Array
  demand: jax.Array
  prompt: jax.Array
  max_new: jax.Array
  left: jax.Array
  reserved: jax.Array
  sums: jax.Array


def init(config: SchedulerConfig) -> Memory:
  """Nobody, and no ratio yet: it comes from the hyper-parameters of the first step."""

  def number(value: int = 0) -> jax.Array:
    return jnp.full((), value, jnp.int32)

  def column() -> jax.Array:
    return jnp.zeros(config.max_requests, jnp.int32)

  return Memory(
    chunked=number(config.max_requests), batch_is_full=jnp.zeros((), bool), ratio=number(-1),
    countdown=number(), role=column(), left=column(), ghosts=number(), ghost_left=number(),
  )  # fmt: skip


def _knobs(context: Context) -> Knobs:
  given, page_size = context.params.policy, context.config.cache.page_size

  def number(name: str) -> jax.Array:
    return jnp.asarray(given[name], jnp.int32)

  size, budget = number("chunked_prefill_size"), context.params.budget
  chunking = context.params.chunked_prefill & (size > 0)
  chunk = jnp.where(chunking, jnp.minimum(size, budget), budget)
  ratio = jnp.minimum(given["init_new_token_ratio"] * given["schedule_conservativeness"], 1.0)
  first = units(ratio)
  floor = units(ratio * given["min_new_token_ratio_factor"])
  steps = number("new_token_ratio_decay_steps")
  return Knobs(
    chunking=chunking,
    chunk=chunk,
    unit=jnp.where(chunk < page_size, 1, page_size),
    max_prefill=number("max_prefill_tokens"),
    interval=number("prefill_decode_interval"),
    first=first,
    floor=floor,
    decay=(first - floor + steps // 2) // steps,
    retract_steps=number("retract_decode_steps"),
    clip=number("clip_max_new_tokens"),
    overhead=jnp.where(given["page_overhead"] > 0, page_size, 0),
    gate=(given["legacy_rem_input_gate"] > 0) | ~chunking,
  )


def units(ratio: jax.Array) -> jax.Array:
  """i32[]: a ratio in [0, 1], f32[], in units of 2**-30."""
  return jnp.asarray(ratio * ONE, jnp.int32)


def fold(draft: Draft, memory: Memory, context: Context) -> Round:
  """Joins the last prefill batch to the decode set, and notes who has left."""
  state, knobs, page_size = context.state, _knobs(context), context.config.cache.page_size
  nobody = state.status.shape[0]
  runs = state.status == Status.RUNNING
  chunked = jnp.where(
    runs.at[memory.chunked].get(mode="fill", fill_value=False), memory.chunked, nobody
  )
  rest = runs & (jnp.arange(nobody) != chunked)
  gone, was_row = (memory.role == MEMBER) & ~runs, memory.role == ROW
  ghosts = memory.ghosts + jnp.sum(gone, dtype=jnp.int32)
  ghost_left = memory.ghost_left + jnp.sum(jnp.where(gone, memory.left, 0))
  before = ghosts + jnp.sum(rest & ~was_row, dtype=jnp.int32)
  # An empty decode set becomes the last batch itself, whose flag is off.
  forgets = jnp.any(was_row & ~rest) | (jnp.any(was_row & rest) & (before == 0))
  prompt, max_total = (
    field.at[draft.request].get(mode="fill", fill_value=0)
    for field in (state.num_prompt, state.max_total)
  )
  left = jnp.clip(max_total - draft.known, 0, knobs.clip)
  members = draft.running & (draft.request != chunked)
  active, sums = _sums(draft, members & ~draft.idle, max_total - prompt, knobs, context)
  demand = jnp.maximum(ceil_div(draft.computed + 1, page_size) - draft.held, 0)
  ratio = jnp.where(memory.ratio < 0, knobs.first, memory.ratio)
  size, left_sum = jnp.sum(
    jnp.where(members[None], jnp.stack([jnp.ones_like(left), left]), 0), axis=1
  )
  return Round(
    knobs=knobs,
    context=context,
    chunked=chunked,
    chunking=chunked < nobody,
    full=memory.batch_is_full & ~forgets,
    ratio=ratio,
    skip=(knobs.interval > 0) & (memory.countdown > 0),
    size=size + ghosts,
    ghosts=ghosts,
    ghost_left=ghost_left,
    members=members,
    active=active,
    demand=jnp.where(active, demand, 0),
    prompt=prompt,
    max_new=max_total - prompt,
    left=left,
    reserved=ratio.astype(jnp.float32) / ONE * (left_sum + ghost_left).astype(jnp.float32),
    sums=sums,
  )


def _sums(
  draft: Draft, decodes: jax.Array, max_new: jax.Array, knobs: Knobs, context: Context
) -> tuple[jax.Array, jax.Array]:
  """(decodes within the budget bool[Q], `Round.sums`), from one pass of prefix sums."""
  candidate = draft.waiting & ~draft.idle
  billed = whole_pages(draft.need, context)
  charge = billed + knobs.overhead + jnp.minimum(max_new, knobs.clip)
  columns = jnp.stack([jnp.ones_like(billed), draft.need, billed, charge])
  columns = jnp.where(candidate[None], columns, 0)
  sums = prefix_sum(jnp.concatenate([columns, decodes.astype(jnp.int32)[None]]))
  return decodes & (sums[4] <= context.params.budget), sums[:4]


def whole_pages(tokens: jax.Array, context: Context) -> jax.Array:
  """Tokens rounded up to whole pages, i32 of any shape."""
  page_size = context.config.cache.page_size
  return ceil_div(tokens, page_size) * page_size
