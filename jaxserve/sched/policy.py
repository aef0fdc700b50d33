"""What a scheduling policy is, and how rules compose into one.

A step under decision is a `Draft`. A `Rule` takes a draft one step further: grants tokens, takes
pages, admits, preempts. `chain` runs rules one after the other, `first_of` and `alternate` choose
between two, and a `Policy` is a rule with its source, so that a new policy is a few lines:

  rule = chain(cap_by_threshold(), serve(running), fit_pages(), admit())

The form is that of optax (`init`, then `update` with a state): a rule that remembers something
keeps it as a pytree inside `SchedulerState.policy`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.config import SchedulerConfig
from jaxserve.pytree import pytree_dataclass
from jaxserve.types import SchedulerParams, SchedulerState, Status

MOST_IDLE_STEPS = 200
"""Steps in a row that a policy may do nothing although requests wait; more is an error."""


@pytree_dataclass
class Draft:
  """A step being decided. Arrays are in order of service: running requests, waiting ones, nobody.

  request: i32[Q], slots; Q for nobody.
  known: i32[Q], tokens of prompt and outputs.
  computed: i32[Q], tokens whose KV is written; 0 for who waits.
  held: i32[Q], pages held; 0 for who waits.
  running: bool[Q].
  waiting: bool[Q].
  idle: bool[Q], sits this step out: ends by length, or its next input is still on its way.
  need: i32[Q], tokens it asks for; rules may lower it.
  tokens: i32[Q], granted so far.
  pages: i32[Q], to be handed out.
  admitted: bool[Q].
  preempted: bool[Q].
  budget: i32[], tokens left.
  free: i32[], pages left.
  hits: i32[Q], pages of the admitted that the prefix cache gives them; None without one. Then
    `computed` and `held` of the admitted are what they have by that.
  source: i32[Q], the request whose pages they are; Q: the pool's own.
  queue: i32[Q], the queue after this step, where the policy reorders it; None: as it was. Running
    requests must stand in front.
  extra: i32[Q], draft tokens it could verify besides what it needs; see `sched.drafts`. None
    without speculation.
  """

  request: jax.Array
  known: jax.Array
  computed: jax.Array
  held: jax.Array
  running: jax.Array
  waiting: jax.Array
  idle: jax.Array
  need: jax.Array
  tokens: jax.Array
  pages: jax.Array
  admitted: jax.Array
  preempted: jax.Array
  budget: jax.Array
  free: jax.Array
  hits: Any = None
  source: Any = None
  queue: jax.Array | None = None
  extra: jax.Array | None = None

  @property
  def decoding(self) -> jax.Array:
    """bool[Q]: running, and only its last token is to be computed."""
    return self.running & (self.known - self.computed == 1)


class Context(NamedTuple):
  """What rules may look at besides the draft."""

  state: SchedulerState
  params: SchedulerParams
  config: SchedulerConfig


class Rule(NamedTuple):
  """One step of a decision.

  Attributes:
    init: config -> its memory, a pytree; () for most.
    apply: (draft, memory, context) -> (draft, memory).
  """

  init: Callable[[SchedulerConfig], Any]
  apply: Callable[[Draft, Any, Context], tuple[Draft, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """A rule and what is to be known of it.

  Attributes:
    rule: decides the step.
    formula: the rule in one or two lines.
    source: the system or paper it comes from.
    words: what it does to requests, for somebody new to the matter; goes on from its name.
    deviates: where it differs from its source on purpose.
    drafts: it can verify draft tokens, so config.max_drafts may be above 0.
    defaults: hyper-parameters, the initial `SchedulerParams.policy`; may be swept and vmapped.
    no_prefix_cache: why the policy cannot be used with `SchedulerConfig.prefix_cache`; "": it can.
    reserves_longest: every request holds the pages of the longest one there may be.
    whole_prompts: a prompt longer than the budget can never be served.
    exceptions: laws that it breaks by design; "decode_waits": a decode may wait for a prefill;
      "idle_steps": some steps may do nothing although requests wait, a bounded number in a row.
    ranges: (hyper-parameter, least, most), for those that may be other than positive.
  """

  rule: Rule
  formula: str
  source: str
  words: str = ""
  deviates: str = ""
  drafts: bool = False
  defaults: tuple[tuple[str, float], ...] = ()
  no_prefix_cache: str = ""
  reserves_longest: bool = False
  whole_prompts: bool = False
  exceptions: frozenset[str] = frozenset()
  ranges: tuple[tuple[str, float, float], ...] = ()


def stateless(apply: Callable[[Draft, Context], Draft]) -> Rule:
  """A rule without memory."""
  return Rule(lambda config: (), lambda draft, memory, context: (apply(draft, context), memory))


def chain(*rules: Rule) -> Rule:
  """All rules, one after the other."""

  def apply(draft: Draft, memory: tuple, context: Context) -> tuple[Draft, tuple]:
    new = []
    for rule, own in zip(rules, memory, strict=True):
      draft, own = rule.apply(draft, own, context)
      new.append(own)
    return draft, tuple(new)

  return Rule(lambda config: tuple(rule.init(config) for rule in rules), apply)


def first_of(one: Rule, other: Rule) -> Rule:
  """`one` if it does anything, else `other`; either sees the draft as it was."""

  def apply(draft: Draft, memory: tuple, context: Context) -> tuple[Draft, tuple]:
    a, b = one.apply(draft, memory[0], context), other.apply(draft, memory[1], context)
    return _choose(~_acts(a[0]), a, b, memory)

  return Rule(lambda config: (one.init(config), other.init(config)), apply)


def alternate(one: Rule, other: Rule) -> Rule:
  """By turns, `one` first; who has nothing to do leaves the step to the other.

  Memory: (bool[], it is the turn of `other`; the memories of both).
  """

  def apply(draft: Draft, memory: tuple, context: Context) -> tuple[Draft, tuple]:
    turn, both = memory
    a, b = one.apply(draft, both[0], context), other.apply(draft, both[1], context)
    use_other = jnp.where(turn, _acts(b[0]), ~_acts(a[0]))
    chosen, both = _choose(use_other, a, b, both)
    return chosen, (jnp.where(_acts(chosen), ~use_other, turn), both)

  def init(config: SchedulerConfig) -> tuple:
    return jnp.zeros((), bool), (one.init(config), other.init(config))

  return Rule(init, apply)


def _choose(
  use_other: jax.Array, a: tuple[Draft, Any], b: tuple[Draft, Any], memory: tuple[Any, Any]
) -> tuple[Draft, tuple[Any, Any]]:
  """The draft of one rule; the memory of the other stays what it was."""
  draft = _select(use_other, b[0], a[0])
  return draft, (_select(use_other, memory[0], a[1]), _select(use_other, b[1], memory[1]))


def begin(context: Context) -> Draft:
  """The draft before any rule: who is there, and what each asks for."""
  state, params, config = context
  request = service_order(state, config)

  def take(field: jax.Array) -> jax.Array:
    return field.at[request].get(mode="fill", fill_value=0)

  status, known, computed = take(state.status), take(state.num_known), take(state.num_computed)
  running, waiting = status == Status.RUNNING, status == Status.WAITING
  idle = (known >= take(state.max_total)) | (
    take(state.await_host) & (take(state.num_in_flight) > 0)
  )
  extra = None
  if state.num_drafts is not None:
    drafts, in_flight = take(state.num_drafts), take(state.num_in_flight)
    # Drafts that nobody has verified yet, or that a newer output makes stale.
    idle |= (drafts > 0) & (in_flight > 0)
    decoding = running & ~idle & (known - computed == 1)
    # The step yields one token more than it verifies.
    extra = jnp.where(decoding, jnp.clip(drafts, 0, take(state.max_total) - known - 1), 0)
  nothing, nobody = jnp.zeros_like(request), jnp.zeros_like(running)
  return Draft(
    request=request,
    known=known,
    computed=computed,
    held=take(state.num_pages),
    running=running,
    waiting=waiting,
    idle=idle,
    need=jnp.where((running | waiting) & ~idle, known - computed, 0),
    tokens=nothing,
    pages=nothing,
    admitted=nobody,
    preempted=nobody,
    budget=jnp.asarray(params.budget, jnp.int32),
    free=state.pool.num_free,
    hits=None if state.reuse is None else nothing,
    source=None if state.reuse is None else jnp.full_like(request, config.max_requests),
    extra=extra,
  )


def service_order(state: SchedulerState, config: SchedulerConfig) -> jax.Array:
  """i32[Q]: running requests, then waiting ones, each in queue order; then Q.

  Under FCFS that is the queue itself: admission takes a prefix of it and preemption a suffix of
  what runs, so the running requests always stand in front.
  """
  if config.ordering == "fcfs":
    return state.queue
  num_requests = config.max_requests
  status = state.status.at[state.queue].get(mode="fill", fill_value=Status.FREE)
  kinds = jnp.stack([status == Status.RUNNING, status == Status.WAITING])
  sums = jnp.cumsum(kinds, axis=-1, dtype=jnp.int32)
  place = jnp.where(kinds[0], sums[0] - 1, sums[0, -1] + sums[1] - 1)
  lane = jnp.arange(num_requests, dtype=jnp.int32)
  place = jnp.where(kinds[0] | kinds[1], place, num_requests + lane)
  order = jnp.full(num_requests, num_requests, jnp.int32)
  return order.at[place].set(state.queue, mode="drop", unique_indices=True)


def _acts(draft: Draft) -> jax.Array:
  return jnp.any(draft.tokens > 0) | jnp.any(draft.preempted)


def _select(use: jax.Array, a: Any, b: Any) -> Any:
  return jax.tree.map(lambda x, y: jnp.where(use, x, y), a, b)
