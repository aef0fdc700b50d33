"""Simulations from the outside: one configuration, or many in one call."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve import cache, sched
from jaxserve.config import SchedulerConfig
from jaxserve.pytree import scalar
from jaxserve.sim import clock
from jaxserve.sim.load import StepTime
from jaxserve.sim.result import SimResult
from jaxserve.sim.server import Counts, Requests, Server, SimState, init, running, step
from jaxserve.types import SchedulerParams
from jaxserve.workload import Workload

OnProgress = Callable[[int], None]
"""Told the requests submitted so far, of all lanes together: 0 once all is compiled, then now and
then, at last all of them."""

# Bounds the sums of a call: so many steps of the largest budget stay below 2^31 tokens.
_STEPS_PER_CALL = 1 << 15
_VOCABULARY = 1 << 15  # of the prompts that stand for a trace's blocks


def simulate(
  workload: Workload, config: SchedulerConfig, params: SchedulerParams, step_time: StepTime, *,
  overlap: bool = True, buckets: tuple[int, ...] = (), on_progress: OnProgress | None = None,
) -> SimResult:  # fmt: skip
  """Serves a workload in virtual time, to its end, with the engine's scheduler.

  Exact: every step is decided by `sched.schedule`, time is integer nanoseconds, and the result does
  not depend on the machine that simulates but for the rounding of `step_time`. Requests that
  find all max_requests slots taken are held back, in order, and their time to the first token
  runs from their arrival.

  Args:
    workload: n requests.
    config: of the scheduler, its policy included.
    params: from `sched.make_params`.
    step_time: seconds of a step; see `sim.roofline`.
    overlap: decide a step before the outputs of the one before are read, as the engine does.
    buckets: token counts that steps are padded to, rising, the last config.max_budget; (): none.
    on_progress: see `OnProgress`.

  Returns:
    SimResult without lanes.

  Raises:
    ValueError: a request could never be served, by number; or a shape does not fit.
    RuntimeError: the policy left requests waiting for ever.

  Cost: 25 to 55 us a step at 64 rows, by what else the cores do; 8 bytes an output token.
  """
  lanes = jax.tree.map(lambda leaf: np.asarray(leaf)[None], params)
  server = Server(config=config, step_time=step_time, overlap=overlap, buckets=tuple(buckets))
  return _run([workload], server, lanes, on_progress).lane(0, 0)


def sweep(
  workload: Workload | Sequence[Workload], config: SchedulerConfig, params: SchedulerParams,
  step_time: StepTime, *, overlap: bool = True, buckets: tuple[int, ...] = (),
  on_progress: OnProgress | None = None,
) -> SimResult:  # fmt: skip
  """`simulate` for many parameters and workloads at once: one program, `vmap`ped over lanes.

  Every lane equals its own `simulate`, bit by bit. All lanes run until the last has finished.

  Args:
    workload: one, or W of the same number of requests (such as other seeds).
    config: shared by all lanes.
    params: leaves with a leading axis of P settings; see `grid`.
    step_time: as in `simulate`.
    overlap: as in `simulate`.
    buckets: as in `simulate`.
    on_progress: as in `simulate`.

  Returns:
    SimResult with lanes [P] for one workload, [W, P] for several.

  Raises:
    ValueError: as in `simulate`, or the workloads differ in length.
    RuntimeError: as in `simulate`.

  Cost: 30 us a step of a lane at 64 rows; memory as `simulate` for each lane.
  """
  server = Server(config=config, step_time=step_time, overlap=overlap, buckets=tuple(buckets))
  if isinstance(workload, Workload):
    return _run([workload], server, params, on_progress).lane(0)
  return _run(list(workload), server, params, on_progress)


def grid(
  config: SchedulerConfig, **axes: Sequence[Any]
) -> tuple[SchedulerParams, list[dict[str, Any]]]:  # fmt: skip
  """Every combination of values as one batch of parameters for `sweep`.

  Args:
    config: that they must fit.
    **axes: arguments of `sched.make_params`, each with the values it takes, the last fastest.

  Returns:
    (parameters with a leading axis [P], the P settings as keyword arguments).

  Raises:
    ValueError: a combination is out of range.
  """
  shape = tuple(len(values) for values in axes.values())
  settings = [
    {name: axes[name][i] for name, i in zip(axes, index, strict=True)}
    for index in np.ndindex(*shape)
  ]
  made = [sched.make_params(config, **setting) for setting in settings]
  return jax.tree.map(lambda *leaves: np.stack(leaves), *made), settings


def requests_of(
  workload: Workload, config: SchedulerConfig, size: int | None = None
) -> Requests:  # fmt: skip
  """The workload as arrays for `sim.step`, on the host.

  A request that would outgrow max_model_len ends there, as in the engine.

  Args:
    workload: of at most `size` requests.
    config: of the scheduler.
    size: n, padding included; None: as many as there are.
  """
  size = len(workload) if size is None else size
  total = workload.num_prompt.astype(np.int64) + workload.num_output
  total = np.minimum(total, config.max_model_len).astype(np.int32)
  outputs = total - workload.num_prompt
  arrays: dict[str, Any] = {
    "arrival": clock.from_seconds(workload.arrival_s),
    "num_prompt": workload.num_prompt,
    "max_total": total,
    "priority": workload.priority,
    "first_output": (np.cumsum(outputs) - outputs).astype(np.int32),
  }
  if config.prefix_cache:
    arrays |= dict(zip(("digests", "num_digests"), _digests(workload, total, config), strict=True))
  padded = jax.tree.map(
    lambda x: np.pad(x, [(0, size - len(x)), *[(0, 0)] * (x.ndim - 1)]), arrays
  )  # fmt: skip
  return Requests(count=scalar(len(workload), np.int32), **padded)


def _digests(
  workload: Workload, total: np.ndarray, config: SchedulerConfig
) -> tuple[np.ndarray, np.ndarray]:
  """(digests of all pages u32[n, M, 4], pages of prompts i32[n]); outputs are like no others."""
  page_size, root = config.cache.page_size, cache.root_digest(b"")
  digests = np.zeros((len(workload), config.pages_per_request, 4), np.uint32)
  for index in range(len(workload)):
    prompt = workload.prompt(index, _VOCABULARY)
    outputs = _VOCABULARY * (1 + index) + np.arange(total[index] - len(prompt))
    text = np.concatenate([prompt, outputs % (1 << 31)])
    pages = cache.page_digests(text, page_size, root)
    digests[index, : len(pages)] = pages
  return digests, workload.num_prompt // page_size


def roomy(size: int) -> int:
  """The next of 1024, 1280, 1536, 1792, 2048, 2560, ...: few sizes, so few programs to compile."""
  unit = 1 << max((size - 1).bit_length() - 3, 8)
  return max(-(-size // unit) * unit, 1024)


def advance(
  sim: SimState, requests: Requests, params: SchedulerParams, server: Server, *,
  most: int = _STEPS_PER_CALL, many: bool = False,
) -> SimState:  # fmt: skip
  """At most `most` iterations of `step`, fewer if all is done. Traceable.

  Args:
    sim: with a leading axis of lanes if `many`.
    requests: with the same axis if `many`.
    params: with the same axis if `many`.
    server: static.
    most: iterations.
    many: whether there are lanes.
  """

  def one(sim: SimState, requests: Requests, params: SchedulerParams) -> SimState:
    return step(sim, requests, params, server)[0]

  turn = jax.vmap(one) if many else one
  alive = jax.vmap(running) if many else running
  # Not a vmapped while_loop: that would copy every lane's arrays at every step.
  _, sim = lax.while_loop(
    lambda carry: (carry[0] < most) & jnp.any(alive(carry[1], requests)),
    lambda carry: (carry[0] + 1, turn(carry[1], requests, params)),
    (jnp.int32(0), sim),
  )
  return sim


@functools.lru_cache(maxsize=32)
def _compiled(server: Server, many: bool, shapes: tuple) -> Callable[..., SimState]:
  """`advance` of a server for arguments of these shapes, as `_shapes` tells them."""
  structure, leaves = shapes
  args = structure.unflatten([jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
  advance_fn = functools.partial(advance, server=server, many=many)
  return jax.jit(advance_fn, donate_argnums=0).lower(*args).compile()


def _shapes(args: tuple) -> tuple:
  leaves, structure = jax.tree.flatten(args)
  return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _run(
  workloads: Sequence[Workload], server: Server, params: SchedulerParams,
  on_progress: OnProgress | None,
) -> SimResult:  # fmt: skip
  """All workloads under all parameters [P], with lanes [W, P]."""
  settings = len(jax.tree.leaves(params)[0])
  lengths = {len(workload) for workload in workloads}
  if len(lengths) != 1 or not settings:
    raise ValueError(
      f"workload: lengths {sorted(lengths)} and {settings} settings; need one of each"
    )
  for workload in workloads:
    check_servable(workload, server.config, params)
  shape = (len(workloads), settings)
  (count,) = lengths
  requests = jax.tree.map(
    lambda *x: np.repeat(np.stack(x), settings, axis=0),
    *(requests_of(workload, server.config, roomy(count)) for workload in workloads),
  )
  lanes = jax.tree.map(lambda x: np.concatenate([np.asarray(x)] * len(workloads)), params)
  num_outputs = int((requests.max_total - requests.num_prompt).sum(-1).max())
  many = shape != (1, 1)
  if not many:
    requests, lanes = jax.tree.map(lambda x: x[0], (requests, lanes))
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    sim, counts = _drive(server, requests, lanes, roomy(num_outputs), many, on_progress)
  requests, sim, counts = jax.tree.map(
    lambda x: x.reshape(*shape, *x.shape[many:]), (requests, sim, counts)
  )
  return _result(requests, sim, counts, count, num_outputs)


def _drive(
  server: Server, requests: Requests, params: SchedulerParams, num_outputs: int, many: bool,
  on_progress: OnProgress | None,
) -> tuple[SimState, Counts]:  # fmt: skip
  """Calls the compiled loop until every lane has ended; sums beyond int32 are taken here."""
  requests, params = jax.tree.map(jnp.asarray, (requests, params))
  sim = init(server.config, requests.num_prompt.shape[-1], num_outputs)
  if many:
    lanes = requests.num_prompt.shape[0]
    sim = jax.tree.map(lambda x: jnp.tile(x, (lanes, *[1] * x.ndim)), sim)
  advance_fn = _compiled(server, many, _shapes((sim, requests, params)))
  alive = jax.vmap(running) if many else running
  sums: Counts | None = None
  if on_progress:
    on_progress(0)
  while True:
    sim = advance_fn(sim, requests, params)
    part = jax.tree.map(lambda x: np.asarray(x, np.int64), sim.counts)
    sums = part if sums is None else jax.tree.map(np.add, sums, part)
    if on_progress:
      on_progress(int(np.asarray(sim.next).sum()))
    if not np.asarray(alive(sim, requests)).any():
      break
    sim = dataclasses.replace(sim, counts=jax.tree.map(jnp.zeros_like, sim.counts))
  if (np.asarray(sim.idle_rounds) >= sched.MOST_IDLE_STEPS).any():
    raise RuntimeError("requests wait and no step can serve any of them under this policy")
  return jax.tree.map(np.asarray, sim), sums


def _result(
  requests: Requests, sim: SimState, counts: Counts, count: int, num_outputs: int
) -> SimResult:  # fmt: skip
  """In f64 seconds and without the padding."""
  return SimResult(
    arrival_s=clock.to_seconds(requests.arrival)[..., :count],
    num_prompt=np.asarray(requests.num_prompt)[..., :count],
    num_output=np.asarray(requests.max_total - requests.num_prompt)[..., :count],
    started_s=clock.to_seconds(sim.started)[..., :count],
    token_s=clock.to_seconds(sim.tokens)[..., :num_outputs],
    steps=np.asarray(counts.steps),
    tokens=np.asarray(counts.tokens),
    padding=np.asarray(counts.padding),
    preemptions=np.asarray(counts.preemptions),
    busy_s=clock.to_seconds(counts.busy),
    cached=np.asarray(counts.cached),
  )


def check_servable(workload: Workload, config: SchedulerConfig, params: SchedulerParams) -> None:
  """Refuses what the engine would refuse; the longest requests stand for the others."""
  if not len(workload):
    raise ValueError("workload: has no request")
  if config.ordering != "priority" and workload.priority.any():
    raise ValueError('workload: has priorities; the scheduler orders by arrival; use "priority"')
  total = workload.num_prompt.astype(np.int64) + workload.num_output
  for index in {int(workload.num_prompt.argmax()), int(total.argmax())}:
    for lane in range(len(jax.tree.leaves(params)[0])):
      one = jax.tree.map(lambda leaf, lane=lane: np.asarray(leaf)[lane], params)
      prompt, output = int(workload.num_prompt[index]), int(workload.num_output[index])
      try:
        sched.check_request(config, one, prompt, output)
      except ValueError as error:
        raise ValueError(f"request {index}: {error}") from None
