"""A scheduler run by request names: submit, abort, schedule and commit, jitted, on one state.

With a prefix cache, a prompt of which nobody says what it holds shares nothing with any other, nor
does an output.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.vectors.outcome import Unsupported
from jaxserve import cache, sched
from jaxserve.config import SchedulerConfig
from jaxserve.types import Decision, SchedulerParams, SchedulerState, Status


@functools.partial(jax.jit, static_argnames="config")
def _schedule(state: SchedulerState, params: SchedulerParams, config: SchedulerConfig) -> Any:
  return sched.schedule(state, params, config)


_UNIQUE = 1 << 20  # tokens of prompts that nobody described

_init = jax.jit(sched.init, static_argnames="config")
_submit = jax.jit(sched.submit)
_abort = jax.jit(sched.abort)
_commit = jax.jit(sched.commit)


@jax.jit
def _propose(state: SchedulerState, drafts: Any) -> SchedulerState:
  """Drafts for those who decode and whose last token is known; others' are dropped."""
  ready = (state.status == Status.RUNNING) & (state.num_known - state.num_computed == 1)
  ready &= state.num_in_flight == 0
  return dataclasses.replace(state, num_drafts=jnp.where(ready, drafts, 0))


@functools.partial(jax.jit, static_argnames="config")
def _start(state: SchedulerState, slot: Any, out: Any, config: SchedulerConfig) -> SchedulerState:
  """The waiting request in `slot` as if it had run until its `out`-th output was known."""
  computed = state.num_prompt[slot] + out - 1
  count = -(-computed // config.cache.page_size)
  pool, ids = cache.allocate(state.pool, count, config.pages_per_request)
  return dataclasses.replace(
    state,
    status=state.status.at[slot].set(int(Status.RUNNING)),
    num_known=state.num_known.at[slot].set(computed + 1),
    num_computed=state.num_computed.at[slot].set(computed),
    num_pages=state.num_pages.at[slot].set(count),
    block_tables=state.block_tables.at[slot].set(ids),
    pool=pool,
  )


@dataclasses.dataclass(frozen=True)
class Step:
  """One decision by request names.

  decision: for `commit`.
  order: scheduled requests in order of service.
  tokens, start, samples: of the scheduled requests.
  computed: tokens of the scheduled requests whose KV exists after the step.
  admitted: in order of service; `resumed` holds those of them that were preempted before.
  preempted: by name.
  in_flight: preempted requests with an output in flight.
  decoding: requests whose whole prompt was computed before the step.
  drafts: of the scheduled requests that have some, how many of their tokens are drafts.
  """

  decision: Decision
  order: list[str]
  tokens: dict[str, int]
  start: dict[str, int]
  samples: dict[str, bool]
  computed: dict[str, int]
  admitted: list[str]
  resumed: list[str]
  preempted: list[str]
  in_flight: list[str]
  decoding: frozenset[str]
  drafts: dict[str, int]


def _drafts(decision: Decision, name_of: Mapping[int, str]) -> dict[str, int]:
  if decision.drafts is None:
    return {}
  return {name_of[int(q)]: int(decision.drafts[q]) for q in np.flatnonzero(decision.drafts)}


def host(tree: Any) -> Any:
  """Arrays of a record as NumPy arrays."""
  return jax.tree.map(np.asarray, tree)


class Driver:
  """Drives the pure functions and translates slots to names. Counts outputs per request."""

  def __init__(self, config: SchedulerConfig, params: SchedulerParams):
    self.config, self.params = config, params
    self.state = _init(config)
    self.slots: dict[str, int] = {}  # live requests
    self.names: dict[int, str] = {}  # submit number -> name, of all requests ever
    self.admitted: list[str] = []  # running requests in order of admission
    self.decoding: set[str] = set()
    self.outputs: dict[str, int] = {}
    self.chains: dict[str, cache.PageChain] = {}
    self.tokens: dict[str, list[int]] = {}  # prompt and outputs

  def submit(
    self, name: str, num_prompt: int, max_total: int, priority: int = 0, await_host: bool = False,
    prompt: Sequence[int] = (), reads_cache: bool = True,
  ) -> None:  # fmt: skip
    number = int(self.state.num_submitted)
    tokens = list(prompt) or [_UNIQUE * (1 + number) + i for i in range(num_prompt)]
    self.state, slot = _submit(
      self.state, np.int32(num_prompt), np.int32(max_total),
      priority=np.int32(priority), await_host=np.bool_(await_host),
      **self._digests(name, tokens, reads_cache),
    )  # fmt: skip
    assert int(slot) < self.config.max_requests, "the queue of the scenario is too small"
    self.slots[name], self.names[number], self.outputs[name] = int(slot), name, 0

  def _digests(self, name: str, tokens: list[int], reads_cache: bool) -> dict[str, Any]:
    if not self.config.prefix_cache:
      return {}
    chain = cache.PageChain(tokens, self.config.cache.page_size, cache.root_digest(b""))
    digests = np.zeros((self.config.pages_per_request, 4), np.uint32)
    digests[: chain.num_pages] = chain.prompt_digests
    self.chains[name], self.tokens[name] = chain, tokens
    return {
      "digests": digests,
      "num_digests": np.int32(chain.num_pages),
      "reads_cache": np.bool_(reads_cache),
    }

  def start(self, name: str, out: int) -> None:
    """Turns a request just submitted into a running decoder with `out` outputs."""
    computed = self.field("num_prompt", name) + out - 1
    if -(-computed // self.config.cache.page_size) > self.free_pages():
      raise Unsupported(f"request {name} starts with {computed} tokens that the pool cannot hold")
    self.state = _start(self.state, np.int32(self.slots[name]), np.int32(out), self.config)
    self.admitted.append(name)
    self.decoding.add(name)
    self.outputs[name] = out

  def abort(self, names: Collection[str]) -> list[str]:
    """Ends requests from outside; returns those that were alive."""
    live = [name for name in names if name in self.slots]
    self.state = _abort(self.state, self._mask(live))
    self._forget(live)
    return live

  def schedule(self) -> Step:
    before = host(self.state)
    decoding = frozenset(self.decoding)
    self.state, decision = _schedule(self.state, self.params, config=self.config)
    state, decision = host(self.state), host(decision)
    name_of = {slot: name for name, slot in self.slots.items()}
    order = [int(q) for q in decision.order if q < self.config.max_requests]
    admitted = [q for q in order if decision.admitted[q]]
    preempted = [int(q) for q in np.flatnonzero(decision.preempted)]
    gone = {name_of[q] for q in preempted}
    self.admitted = [name for name in self.admitted if name not in gone]
    self.admitted += [name_of[q] for q in admitted]
    self.decoding -= gone
    self.decoding |= {name_of[q] for q in order if decision.samples[q]}
    return Step(
      decision=decision,
      order=[name_of[q] for q in order],
      tokens={name_of[q]: int(decision.tokens[q]) for q in order},
      start={name_of[q]: int(decision.start[q]) for q in order},
      samples={name_of[q]: bool(decision.samples[q]) for q in order},
      computed={name_of[q]: int(state.num_computed[q]) for q in order},
      admitted=[name_of[q] for q in admitted],
      resumed=[name_of[q] for q in admitted if state.num_preemptions[q] > 0],
      preempted=sorted(gone),
      in_flight=[name_of[q] for q in preempted if before.num_in_flight[q] > 0],
      decoding=decoding,
      drafts=_drafts(decision, name_of),
    )

  def yields(self, step: Step) -> list[str]:
    """Requests, still alive, whose next output the step computes."""
    arrival = host(self.state.arrival)
    return [
      name
      for name, samples in step.samples.items()
      if samples and name in self.slots
      if arrival[self.slots[name]] == step.decision.arrival[self.slots[name]]
    ]

  def commit(
    self, step: Step, stopped: Collection[str] = (), outputs: Mapping[str, int] | None = None
  ) -> list[str]:
    """Takes note of the outputs of a step; returns the requests that end with it.

    Args:
      step: the oldest that is in flight.
      stopped: requests that a token ends.
      outputs: how many tokens the step yields, where that is not one.
    """
    counts = np.ones(self.config.max_requests, np.int32)
    digests = np.zeros((self.config.max_requests, 4), np.uint32)
    for name in self.yields(step):
      number = (outputs or {}).get(name, 1)
      counts[self.slots[name]] = number
      for _ in range(number):
        self.outputs[name] += 1
        if self.config.prefix_cache:
          self._note_token(name, digests)
    more = {"digests": digests} if self.config.prefix_cache else {}
    if self.config.max_drafts:
      more |= {"outputs": counts, "proposed": np.zeros_like(counts)}
    name_of = {slot: name for name, slot in self.slots.items()}
    self.state, finished = _commit(self.state, step.decision, self._mask(stopped), **more)
    names = [name_of[int(q)] for q in np.flatnonzero(np.asarray(finished))]
    self._forget(names)
    return names

  def _note_token(self, name: str, digests: np.ndarray) -> None:
    """One more token of a request, none that any other has, and the digest it completes."""
    self.tokens[name].append(_UNIQUE // 2 + self.tokens[name][0] + self.outputs[name])
    digest = self.chains[name].append(self.tokens[name][-1])
    if digest is not None:
      digests[self.slots[name]] = digest

  def propose(self, drafts: Mapping[str, int]) -> None:
    """Offers drafts; requests in the middle of their prompt, or gone, take none."""
    counts = np.zeros(self.config.max_requests, np.int32)
    for name, number in drafts.items():
      if name in self.slots:
        counts[self.slots[name]] = number
    self.state = _propose(self.state, counts)

  def running(self) -> list[str]:
    """Running requests in order of admission."""
    status = host(self.state.status)
    running = {name for name, slot in self.slots.items() if status[slot] == Status.RUNNING}
    assert running == set(self.admitted), (running, self.admitted)
    return list(self.admitted)

  def waiting(self) -> list[str]:
    """Waiting requests in order of service."""
    state = host(self.state)
    name_of = {slot: name for name, slot in self.slots.items()}
    queue = [int(q) for q in state.queue if q < self.config.max_requests]
    return [name_of[q] for q in queue if state.status[q] == Status.WAITING]

  def free_pages(self) -> int:
    return int(self.state.pool.num_free)

  def field(self, name: str, request: str) -> int:
    """A per-request field of the state."""
    return int(getattr(self.state, name)[self.slots[request]])

  def _mask(self, names: Collection[str]) -> np.ndarray:
    slots = [self.slots[name] for name in names]
    return np.isin(np.arange(self.config.max_requests), slots)

  def _forget(self, names: Collection[str]) -> None:
    for name in names:
      del self.slots[name]
    self.admitted = [name for name in self.admitted if name in self.slots]
    self.decoding &= set(self.slots)


def replaced(params: SchedulerParams, numbers: Mapping[str, int]) -> SchedulerParams:
  """Parameters with int32 numbers put in unchecked: recorded runs may use what is refused here."""
  return dataclasses.replace(params, **{k: np.int32(v) for k, v in numbers.items()})
