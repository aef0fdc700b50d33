"""Breadth first over all states that a model reaches; then the drain of every one of them."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from experiments.exhaustive import laws
from experiments.exhaustive.model import Expansion, Model, expansion
from jaxserve import sched
from jaxserve.pytree import pack
from jaxserve.types import SchedulerParams

BATCH, SMALL_BATCH = 512, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Violation:
  """A law that does not hold, and a shortest way to where it does not.

  Attributes:
    law: a name of `laws.LAWS`, "deadlock", "livelock" or "idle".
    trace: events from the empty server on.
    loop: events that follow for ever, for a deadlock or livelock.
  """

  law: str
  trace: tuple[str, ...]
  loop: tuple[str, ...] = ()

  def words(self) -> str:
    """One line."""
    what = laws.LAWS.get(self.law, "requests wait and no step ever ends them")
    forever = f"; then for ever: {', '.join(self.loop)}" if self.loop else ""
    return f"{self.law} ({what}): {'; '.join(self.trace)}{forever}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """What a search saw.

  Attributes:
    states: reachable ones, each once.
    transitions: between them, and how many led nowhere new.
    depth: events to the farthest state.
    longest_drain: steps without arrivals and stops from a state until nobody is there, at most.
    longest_idle: steps in a row that do nothing on the way, at most.
    preempting: states whose next step preempts.
    violation: the first one; None: every law holds, everywhere.
    rows: i32[states, .], the packed states.
  """

  states: int
  transitions: int
  depth: int
  longest_drain: int = 0
  longest_idle: int = 0
  preempting: int = 0
  violation: Violation | None = None
  rows: np.ndarray


class Search:
  """The states found so far, in order of their distance from the empty server."""

  def __init__(self, model: Model, params: SchedulerParams, most_states: int):
    self._model, self._params, self._most = model, params, most_states
    # With a prefix cache a state costs much more, and there are fewer.
    self._batch = SMALL_BATCH if model.config.prefix_cache else BATCH
    self._index: dict[bytes, int] = {}
    self._rows: list[np.ndarray] = []
    self._parent: list[int] = []
    self._event: list[int] = []
    self._next: list[np.ndarray] = []  # where a step without stops leads
    self._flags: list[np.ndarray] = []  # idle, preempts, empty
    self._transitions = 0
    self._depth = 0
    self._add(-1, -1, np.asarray(pack(model.first())))

  def run(self, expand: Callable[..., Expansion]) -> Found:
    """All of it."""
    possible, begin, violation = self._model.possible(self._params), 0, None
    if not possible.any():
      raise ValueError("every kind of request is refused: raise the budget or the pages")
    while begin < len(self._rows) and violation is None:
      end = len(self._rows)
      for at in range(begin, end, self._batch):
        violation = self._expand(expand, possible, at, min(at + self._batch, end))
        if violation:
          break
      self._depth += len(self._rows) > end
      begin = end
    found = Found(
      states=len(self._rows), transitions=self._transitions, depth=self._depth,
      violation=violation, rows=np.stack(self._rows),
    )  # fmt: skip
    return found if violation else self._drained(found)

  def _add(self, parent: int, event: int, row: np.ndarray) -> None:
    self._index[row.tobytes()] = len(self._rows)
    self._rows.append(row)
    self._parent.append(parent)
    self._event.append(event)

  def _expand(
    self, expand: Callable[..., Expansion], possible: np.ndarray, begin: int, end: int
  ) -> Violation | None:
    """States begin to end: adds what is new, or tells of the first law that is broken."""
    batch = np.stack(self._rows[begin:end])
    padded = np.zeros((self._batch, batch.shape[1]), batch.dtype)
    padded[: end - begin], padded[end - begin :] = batch, batch[0]
    out = jax.tree.map(
      lambda x: np.asarray(x)[: end - begin], expand(padded, self._params, possible)
    )
    broken = np.argwhere((out.broken != 0) & out.enabled)
    if len(broken):
      state, event = broken[0]
      bits = int(out.broken[state, event])
      law = next(name for i, name in enumerate(laws.LAWS) if bits >> i & 1)
      trace = (*self._trace(begin + int(state)), self._model.events[int(event)])
      return Violation(law=law, trace=trace)
    states, events = np.nonzero(out.enabled)
    rows = np.ascontiguousarray(out.nodes[states, events])
    targets = np.empty(len(rows), np.int64)
    for i, key in enumerate(rows.view(np.dtype((np.void, rows.shape[1] * 4))).ravel().tolist()):
      known = self._index.get(key)
      if known is None:
        known = len(self._rows)
        self._add(begin + int(states[i]), int(events[i]), rows[i].copy())
      targets[i] = known
    if len(self._rows) > self._most:
      raise ValueError(f"most_states={self._most}: there are more; make the scheduler smaller")
    self._transitions += len(rows)
    self._next.append(targets[events == self._model.step_event])
    self._flags.append(np.stack([out.idle, out.preempts, out.empty], axis=1))
    return None

  def _trace(self, state: int) -> tuple[str, ...]:
    """A shortest way to a state."""
    events = []
    while self._parent[state] >= 0:
      events.append(self._model.events[self._event[state]])
      state = self._parent[state]
    return tuple(reversed(events))

  def _drained(self, found: Found) -> Found:
    """Steps alone must empty every state; a state without a way there is on one to a cycle."""
    after, flags = np.concatenate(self._next), np.concatenate(self._flags)
    idle, preempts, empty = flags.T
    left = np.where(empty, 0, -1)
    idle_run = np.zeros_like(left)
    while len(ready := np.flatnonzero((left < 0) & (left[after] >= 0))):
      left[ready] = left[after[ready]] + 1
      idle_run[ready] = np.where(idle[ready], idle_run[after[ready]] + 1, 0)
    violation = None
    if (left < 0).any():
      violation = self._stuck(int(np.argmax(left < 0)), after, idle)
    elif idle_run.max() >= sched.MOST_IDLE_STEPS:
      violation = Violation(law="idle", trace=self._trace(int(np.argmax(idle_run))))
    return dataclasses.replace(
      found, longest_drain=int(left.max()), longest_idle=int(idle_run.max()),
      preempting=int(preempts.sum()), violation=violation,
    )  # fmt: skip

  def _stuck(self, state: int, after: np.ndarray, idle: np.ndarray) -> Violation:
    """The first state, by distance, that steps alone do not empty."""
    path = [state]
    while (following := int(after[path[-1]])) not in path:
      path.append(following)
    cycle = path[path.index(following) :]
    law = "deadlock" if idle[cycle].all() else "livelock"
    steps = len(path) - len(cycle)
    return Violation(
      law=law, trace=(*self._trace(state), *["step"] * steps), loop=("step",) * len(cycle)
    )


def search(
  model: Model, params: SchedulerParams, expand: Callable[..., Expansion] | None = None,
  most_states: int = 1 << 20,
) -> Found:  # fmt: skip
  """Searches all states of a model under some parameters.

  Args:
    model: a tiny scheduler.
    params: its parameters.
    expand: `expansion(model)`, if it is compiled already.
    most_states: more than these are an error.
  """
  return Search(model, params, most_states).run(expand or expansion(model))
