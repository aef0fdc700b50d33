"""The scheduler as a transition system: from a batch of states to all that may come next.

  submit k     a request of kind k, while a slot is free
  abort q      the request in slot q ends from outside
  step S       `schedule`, and `commit` with the outputs of slots S ending their requests; with
               overlap it is the step in flight that is committed, if there is one, and the new one
               stays in flight: the order of `Engine.step`, with arrivals and aborts in between

`sched`'s own functions do it, under vmap; faults are planted by passing others.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.exhaustive import laws
from experiments.exhaustive.canonical import LOST, InFlight, Node, canonical
from jaxserve import sched
from jaxserve.config import SchedulerConfig
from jaxserve.pytree import pack, unpack
from jaxserve.types import Decision, SchedulerParams, SchedulerState, Status


class Kind(NamedTuple):
  """A request that may come. Requests of one text are equal as far as both go."""

  num_prompt: int
  max_tokens: int
  priority: int = 0
  await_host: bool = False
  text: int = 0


class Functions(NamedTuple):
  """What the engine calls."""

  schedule: Callable[..., Any] = sched.schedule
  commit: Callable[..., Any] = sched.commit
  submit: Callable[..., Any] = sched.submit
  abort: Callable[..., Any] = sched.abort


@dataclasses.dataclass(frozen=True)
class Model:
  """A tiny scheduler and what may happen to it.

  Attributes:
    config: its max_requests are the most that live at once.
    kinds: requests that may come.
    overlap: one step may be in flight.
    functions: the scheduler's.
  """

  config: SchedulerConfig
  kinds: tuple[Kind, ...]
  overlap: bool = False
  functions: Functions = Functions()

  def total(self, kind: Kind) -> int:
    return sched.request_limit(self.config, kind.num_prompt, kind.max_tokens)

  def possible(self, params: SchedulerParams) -> np.ndarray:
    """bool[K]: kinds that the engine would not refuse."""
    return np.asarray([self._accepts(kind, params) for kind in self.kinds])

  def _accepts(self, kind: Kind, params: SchedulerParams) -> bool:
    try:
      sched.check_request(self.config, params, kind.num_prompt, kind.max_tokens)
    except ValueError:
      return False
    return True

  @functools.cached_property
  def stops(self) -> np.ndarray:
    """bool[2**Q, Q]: sets of slots; the first is empty."""
    slots = self.config.max_requests
    return (np.arange(1 << slots)[:, None] >> np.arange(slots)) & 1 > 0

  @property
  def step_event(self) -> int:
    """The number of the event "step, and no output ends its request"."""
    return len(self.kinds) + self.config.max_requests

  @property
  def events(self) -> tuple[str, ...]:
    """What every transition of a state is called."""
    submits = [f"submit {k.num_prompt}+{k.max_tokens}" + (f" text {k.text}" if k.text else "")
               + (f" priority {k.priority}" if k.priority else "")
               + (" awaiting the host" if k.await_host else "") for k in self.kinds]  # fmt: skip
    aborts = [f"abort slot {q}" for q in range(self.config.max_requests)]
    stops = [",".join(map(str, np.flatnonzero(row))) for row in self.stops]
    return (*submits, *aborts, *(f"step, {s} stop" if s else "step" for s in stops))

  def first(self) -> Node:
    """The empty server."""
    slots = self.config.max_requests
    nothing = InFlight(
      live=jnp.zeros((), bool), samples=jnp.zeros(slots, bool),
      arrival=jnp.full(slots, LOST, jnp.int32),
    )  # fmt: skip
    return canonical(Node(state=sched.init(self.config), in_flight=nothing))

  @functools.cached_property
  def numbers(self) -> np.ndarray:
    """i32[K, 4]: prompt, total, priority, whether it awaits the host."""
    rows = [(k.num_prompt, self.total(k), k.priority, int(k.await_host)) for k in self.kinds]
    return np.asarray(rows, np.int32)

  @functools.cached_property
  def texts(self) -> np.ndarray:
    """u32[K, M, 4]: digests of every kind's pages, those of the outputs included."""
    pages = self.config.pages_per_request
    digests = np.zeros((len(self.kinds), pages, 4), np.uint32)
    for k, kind in enumerate(self.kinds):
      digests[k, :, :2] = (np.arange(pages) + 1 + pages * kind.text)[:, None]
    return digests


class Expansion(NamedTuple):
  """What may come of a batch of B states. E events a state, in the order of `Model.events`.

  nodes: i32[B, E, .], canonical and packed.
  enabled: bool[B, E].
  broken: i32[B, E], bit i for the i-th law of `laws.LAWS`.
  idle: bool[B], a step does nothing although requests are there and nothing is in flight.
  preempts: bool[B], a step preempts.
  empty: bool[B], no request is there and nothing is in flight.
  """

  nodes: jax.Array
  enabled: jax.Array
  broken: jax.Array
  idle: jax.Array
  preempts: jax.Array
  empty: jax.Array


def expansion(model: Model) -> Callable[..., Expansion]:
  """(packed nodes i32[B, .], params, possible bool[K]) -> Expansion, compiled in a hurry."""
  like = jax.eval_shape(model.first)

  def one(packed: jax.Array, params: SchedulerParams, possible: jax.Array) -> Expansion:
    return _expand(unpack(packed, like), params, possible, model)

  return jax.jit(
    jax.vmap(one, in_axes=(0, None, None)),
    compiler_options={"xla_backend_optimization_level": 0},
  )


def _expand(node: Node, params: SchedulerParams, possible: jax.Array, model: Model) -> Expansion:
  state, slots = node.state, model.config.max_requests
  live = state.status != Status.FREE
  entered = jax.vmap(lambda kind, text: submitted(node, kind, text, model))(
    jnp.asarray(model.numbers), jnp.asarray(model.texts)
  )
  aborted = jax.vmap(
    lambda who: dataclasses.replace(node, state=model.functions.abort(state, who))
  )(jnp.eye(slots, dtype=bool))
  after, deliverable, step_laws, decision = stepped(node, params, model)
  enabled = jnp.concatenate([
    possible & jnp.any(~live), live,
    jnp.all(deliverable[None] | ~jnp.asarray(model.stops), axis=1),
  ])  # fmt: skip
  nodes = jax.tree.map(lambda *some: jnp.concatenate(some), entered, aborted, after)
  state_laws = jax.vmap(lambda n: laws.of_state(n, params, model.config))(nodes)
  names = list(laws.LAWS)
  broken = sum(jnp.where(kept, 0, 1 << names.index(law)) for law, kept in state_laws.items())
  of_step = sum(jnp.where(kept, 0, 1 << names.index(law)) for law, kept in step_laws.items())
  is_step = jnp.arange(enabled.shape[0]) >= model.step_event
  acts = (decision.num_tokens > 0) | jnp.any(decision.preempted) | node.in_flight.live
  return Expansion(
    nodes=jax.vmap(lambda n: pack(canonical(n)))(nodes),
    enabled=enabled,
    broken=broken | jnp.where(is_step, of_step, 0),
    idle=jnp.any(live) & ~acts,
    preempts=jnp.any(decision.preempted),
    empty=~jnp.any(live) & ~node.in_flight.live,
  )


def submitted(node: Node, kind: jax.Array, text: jax.Array, model: Model) -> Node:
  """The node with one more request: a row of `Model.numbers` and of `Model.texts`."""
  options: dict[str, Any] = {"priority": kind[2], "await_host": kind[3] > 0}
  if model.config.prefix_cache:
    pages = kind[0] // model.config.cache.page_size
    there = jnp.arange(text.shape[0])[:, None] < pages
    options |= {"digests": jnp.where(there, text, jnp.zeros_like(text)), "num_digests": pages}
  state, _ = model.functions.submit(node.state, kind[0], kind[1], **options)
  return dataclasses.replace(node, state=state)


def stepped(
  node: Node, params: SchedulerParams, model: Model
) -> tuple[Node, jax.Array, dict[str, jax.Array], Decision]:
  """(a node for each set of stops, whose outputs may stop, laws of the step, its decision)."""
  state, decision = model.functions.schedule(node.state, params, model.config)
  step_laws = laws.of_step(node, state, decision, params, model.config)
  delivered, flight = decision, _nothing(node.in_flight)
  if model.overlap:
    old = node.in_flight
    delivered = dataclasses.replace(decision, samples=old.samples, arrival=old.arrival)
    flight = InFlight(
      live=decision.num_scheduled > 0, samples=decision.samples, arrival=decision.arrival
    )
  live = delivered.samples & (delivered.arrival == state.arrival) & (state.status != Status.FREE)
  options = {"digests": _next_digests(state, live, model)} if model.config.prefix_cache else {}

  def commit(stopped: jax.Array) -> Node:
    new, _ = model.functions.commit(state, delivered, stopped, **options)
    return Node(state=new, in_flight=flight)

  return jax.vmap(commit)(jnp.asarray(model.stops)), live, step_laws, decision


def _nothing(flight: InFlight) -> InFlight:
  return InFlight(
    live=jnp.zeros_like(flight.live), samples=jnp.zeros_like(flight.samples),
    arrival=jnp.full_like(flight.arrival, LOST),
  )  # fmt: skip


def _next_digests(state: SchedulerState, live: jax.Array, model: Model) -> jax.Array:
  """u32[Q, 4]: of the pages that the outputs delivered now complete, as the host would say."""
  totals = jnp.asarray([model.total(kind) for kind in model.kinds])
  prompts = jnp.asarray([kind.num_prompt for kind in model.kinds])
  same = (state.num_prompt[:, None] == prompts[None]) & (state.max_total[:, None] == totals[None])
  texts = jnp.asarray(model.texts)[jnp.argmax(same, axis=1)]
  page_size = model.config.cache.page_size
  told = state.num_known - state.num_in_flight + 1  # this one included
  page = jnp.clip(told // page_size - 1, 0, texts.shape[1] - 1)
  digests = jnp.take_along_axis(texts, page[:, None, None], axis=1)[:, 0]
  full = live & (told % page_size == 0) & (told // page_size == state.reuse.num_digests + 1)
  return jnp.where(full[:, None], digests, jnp.zeros_like(digests))
