"""Several servers behind one router, each with the scheduler of the engine.

Between two arrivals every server goes on by itself, step by step as `simulate` does; an arrival is
routed by what the servers hold at that moment. So round-robin over N servers equals N simulations
of the split workload, bit by bit.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.config import SchedulerConfig
from jaxserve.sim import clock
from jaxserve.sim.clock import Instant
from jaxserve.sim.load import StepTime
from jaxserve.sim.result import SimResult
from jaxserve.sim.run import check_servable, requests_of, roomy
from jaxserve.sim.server import Requests, Server, SimState, init, running, step
from jaxserve.types import SchedulerParams, Status
from jaxserve.workload import Workload

Routing = Literal["round_robin", "least_loaded"] | Callable[[int, np.ndarray], int]
"""Which server gets a request: in turn; the one with the fewest unfinished requests, the first of
equals; or a function of the request's number and the unfinished requests of each server, i64[r]."""

_FOREVER = np.iinfo(np.int32).max
_MOST_TOKENS = 1 << 30  # sums over the steps of one server are int32


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fleet:
  """Equal servers behind one router.

  Attributes:
    config: of each server's scheduler.
    params: of each server's scheduler.
    step_time: seconds of a step; see `sim.roofline`.
    replicas: servers, at least 1.
    routing: see `Routing`.
    overlap: as in `simulate`.
    buckets: as in `simulate`.

  Raises:
    ValueError: replicas or routing is out of range.
  """

  config: SchedulerConfig
  params: SchedulerParams
  step_time: StepTime
  replicas: int = 1
  routing: Routing = "round_robin"
  overlap: bool = True
  buckets: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    if self.replicas < 1:
      raise ValueError(f"replicas={self.replicas}: must be at least 1")
    if not callable(self.routing) and self.routing not in ("round_robin", "least_loaded"):
      raise ValueError(
        f"routing={self.routing!r}: use 'round_robin', 'least_loaded' or a function"
      )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FleetResult:
  """What a fleet did.

  Attributes:
    result: of all requests, in order of arrival. Counts are sums over the servers, busy_s is their
      mean, so that `utilization` is that of the fleet.
    replica: i64[n], which server each request was routed to.
    servers: of each server its own requests; None for one that had none.
  """

  result: SimResult
  replica: np.ndarray
  servers: Sequence[SimResult | None]


def serve(workload: Workload, fleet: Fleet, *, handed_over: bool = False) -> FleetResult:
  """Serves a workload with a fleet in virtual time, to its end.

  Args:
    workload: n requests.
    fleet: that serves it.
    handed_over: every request comes with its prompt's KV and its first output, both made elsewhere;
      see `Server`. It must have two outputs or more; the time of the first is left 0.

  Returns:
    FleetResult.

  Raises:
    ValueError: a request could never be served, by number; or a size does not fit.
    RuntimeError: the policy left requests waiting for ever.

  Cost: that of `simulate` for every server, and 0.1 ms for each request and server it may go to.
  """
  lanes = jax.tree.map(lambda leaf: np.asarray(leaf)[None], fleet.params)
  check_servable(workload, fleet.config, lanes)
  if handed_over and workload.num_output.min() < 2:
    raise ValueError("num_output: a request that is handed over needs two outputs or more")
  tokens = int(workload.num_prompt.sum(dtype=np.int64) + workload.num_output.sum(dtype=np.int64))
  if tokens > _MOST_TOKENS:
    raise ValueError(f"workload: {tokens} tokens are more than {_MOST_TOKENS}; take a part of it")
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    return _serve(workload, fleet, handed_over)


def _serve(workload: Workload, fleet: Fleet, handed_over: bool) -> FleetResult:
  everything = requests_of(workload, fleet.config)
  workload = dataclasses.replace(workload, arrival_s=clock.to_seconds(everything.arrival))
  outputs = np.asarray(everything.max_total - everything.num_prompt)
  server = Server(
    config=fleet.config, step_time=fleet.step_time, overlap=fleet.overlap,
    buckets=tuple(fleet.buckets), handed_over=handed_over,
  )  # fmt: skip
  count, sizes = len(workload), (roomy(len(workload)), roomy(int(outputs.sum())))
  replicas = [_Replica(server, fleet.params, *sizes) for _ in range(fleet.replicas)]
  chosen = np.zeros(count, np.int64)
  for number in range(count):
    one = jax.tree.map(lambda x, i=number: x[i] if np.ndim(x) else x, everything)
    if fleet.routing == "round_robin":
      chosen[number] = number % fleet.replicas
    else:
      loads = np.array([replica.advance(one.arrival) for replica in replicas], np.int64)
      free = callable(fleet.routing)
      chosen[number] = fleet.routing(number, loads) if free else loads.argmin()  # type: ignore[operator]
    replicas[chosen[number]].feed(one)
  servers = [
    replica.finish(workload.where(chosen == i), outputs[chosen == i])
    for i, replica in enumerate(replicas)
  ]
  return FleetResult(
    result=merge(workload, outputs, chosen, servers), replica=chosen, servers=servers
  )  # fmt: skip


def merge(
  workload: Workload, outputs: np.ndarray, chosen: np.ndarray,
  servers: Sequence[SimResult | None],
) -> SimResult:  # fmt: skip
  """The results of several servers as one, in order of the workload.

  Args:
    workload: n requests.
    outputs: i32[n], outputs of each.
    chosen: i64[n], server of each.
    servers: of each server its own requests, in order.
  """
  first = np.cumsum(outputs, dtype=np.int64) - outputs
  token_s, started_s = np.zeros(int(outputs.sum())), np.zeros(len(workload))
  present = [server for server in servers if server is not None]
  for index, server in enumerate(servers):
    if server is None:
      continue
    mine = chosen == index
    own = outputs[mine]
    shift = np.repeat(first[mine] - (np.cumsum(own, dtype=np.int64) - own), own)
    token_s[shift + np.arange(len(shift))] = server.token_s
    started_s[mine] = server.started_s
  return SimResult(
    arrival_s=workload.arrival_s,
    num_prompt=workload.num_prompt,
    num_output=outputs,
    started_s=started_s,
    token_s=token_s,
    **{
      name: np.asarray(sum(int(getattr(server, name)) for server in present))
      for name in ("steps", "tokens", "padding", "preemptions")
    },
    busy_s=np.asarray(sum(float(server.busy_s) for server in present) / len(servers)),
  )


class _Replica:
  """One server at work, fed request by request."""

  def __init__(self, server: Server, params: SchedulerParams, count: int, outputs: int):
    if server.config.prefix_cache:
      raise ValueError("prefix_cache=True: a fleet has none yet; turn it off")
    self._params = jax.tree.map(jnp.asarray, params)
    self._sim = init(server.config, count, outputs)
    zeros = [np.zeros(count, np.int32) for _ in range(6)]
    self._requests = Requests(
      count=cast(Any, np.int32(0)), arrival=Instant(s=zeros[0], ns=zeros[1]),  # type: ignore[arg-type]
      num_prompt=zeros[2], max_total=zeros[3], priority=zeros[4], first_output=zeros[5],  # type: ignore[arg-type]
    )  # fmt: skip
    self._outputs = 0
    self._fed = 0
    self._advance = _advance(server)

  def feed(self, one: Requests) -> None:
    """One more request; it arrives no earlier than those before."""
    held, at = self._requests, self._fed
    for name in ("num_prompt", "max_total", "priority"):
      cast(Any, getattr(held, name))[at] = getattr(one, name)
    cast(Any, held.arrival.s)[at], cast(Any, held.arrival.ns)[at] = one.arrival.s, one.arrival.ns
    cast(Any, held.first_output)[at] = self._outputs
    self._outputs += int(one.max_total - one.num_prompt)
    self._fed += 1
    self._requests = dataclasses.replace(held, count=cast(Any, np.int32(self._fed)))

  def advance(self, until: Instant) -> int:
    """Begins every step that can begin before a time; requests fed and not finished then."""
    if self._fed:
      self._sim, unfinished = self._advance(self._sim, self._requests, self._params, until)
      return int(unfinished)
    return 0

  def finish(self, workload: Workload, outputs: np.ndarray) -> SimResult | None:
    """Runs to the end; `workload` is what was fed."""
    if not self._fed:
      return None
    unfinished = self.advance(Instant(s=np.int32(_FOREVER), ns=np.int32(0)))  # type: ignore[arg-type]
    if unfinished:
      raise RuntimeError("requests wait and no step can serve any of them under this policy")
    sim = jax.tree.map(np.asarray, self._sim)
    counts = sim.counts
    return SimResult(
      arrival_s=workload.arrival_s,
      num_prompt=workload.num_prompt,
      num_output=outputs,
      started_s=clock.to_seconds(sim.started)[: self._fed],
      token_s=clock.to_seconds(sim.tokens)[: self._outputs],
      steps=np.int64(counts.steps),  # type: ignore[arg-type]
      tokens=np.int64(counts.tokens),  # type: ignore[arg-type]
      padding=np.int64(counts.padding),  # type: ignore[arg-type]
      preemptions=np.int64(counts.preemptions),  # type: ignore[arg-type]
      busy_s=clock.to_seconds(counts.busy),
    )


@functools.lru_cache(maxsize=32)
def _advance(server: Server) -> Callable[..., tuple[SimState, jax.Array]]:
  """Iterations that begin before a time, and how many requests are then unfinished."""

  def advance(
    sim: SimState, requests: Requests, params: SchedulerParams, until: Instant
  ) -> tuple[SimState, jax.Array]:
    sim = lax.while_loop(
      lambda sim: running(sim, requests) & clock.before(_begins(sim, requests), until),
      lambda sim: step(sim, requests, params, server)[0],
      sim,
    )
    inside = jnp.sum(sim.sched.status != Status.FREE, dtype=jnp.int32)
    return sim, requests.count - sim.next + inside

  return jax.jit(advance, donate_argnums=0)


def _begins(sim: SimState, requests: Requests) -> Instant:
  """When the next iteration begins: now, or with the next arrival if there is nothing to do."""
  arrival = jax.tree.map(lambda x: x.at[sim.next].get(mode="clip"), requests.arrival)
  idle = ~jnp.any(sim.sched.status != Status.FREE)
  return clock.where(idle, clock.later(sim.now, arrival), sim.now)
