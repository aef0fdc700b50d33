"""One step from random states, reachable or not, against the oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import sched
from jaxserve.config import SchedulerConfig
from jaxserve.types import SchedulerState, Status
from tests.testing import oracle
from tests.testing.scheduling import Twins, small_config

pytestmark = pytest.mark.one_leg

CONFIGS = {
  f"{ordering}_{reserve}": small_config(ordering=ordering, reserve=reserve, max_num_seqs=6)
  for ordering in ("fcfs", "priority")
  for reserve in ("growth", "gate", "none")
}


def random_requests(rng, config: SchedulerConfig) -> list[oracle.Request]:
  """Requests that hold the pages they need, some more; under FCFS the oldest are running."""
  requests, free = [], config.cache.num_pages
  slots = rng.permutation(config.max_requests)[: rng.integers(0, config.max_requests + 1)]
  running = int(rng.integers(0, min(len(slots), config.max_num_seqs) + 1))
  for index, slot in enumerate(slots):
    known = int(rng.integers(1, 30))
    request = oracle.Request(
      slot=int(slot), arrival=index, num_prompt=int(rng.integers(1, known + 1)), known=known,
      priority=int(rng.integers(0, 3)) if config.ordering == "priority" else 0,
      max_total=int(rng.integers(known, 32)), await_host=bool(rng.random() < 0.2),
      in_flight=int(rng.integers(0, 2)),
    )  # fmt: skip
    if index < running:
      request.running, request.computed = True, int(rng.integers(0, known))
      needed = -(-request.computed // config.cache.page_size)
      request.pages = needed + int(rng.integers(0, 2))
      if request.pages > free:
        break
      free -= request.pages
    requests.append(request)
  if config.ordering == "priority":  # there, anybody may run
    for request, arrival in zip(requests, rng.permutation(len(requests)), strict=True):
      request.arrival = int(arrival)
  return requests


def state_of(config: SchedulerConfig, requests, order, rng) -> SchedulerState:
  """The same requests as arrays; every page id is somewhere exactly once."""
  size = config.max_requests
  columns = {
    name: np.zeros(size, np.int32)
    for name in ("status", "arrival", "priority", "num_prompt", "num_known", "num_computed",
                 "max_total", "num_in_flight", "num_pages", "num_preemptions")
  }  # fmt: skip
  await_host = np.zeros(size, bool)
  tables = rng.integers(0, config.cache.num_pages, (size, config.pages_per_request))
  pages = list(rng.permutation(config.cache.num_pages))
  for r in requests:
    values = dict(
      status=Status.RUNNING if r.running else Status.WAITING, arrival=r.arrival,
      priority=r.priority, num_prompt=r.num_prompt, num_known=r.known, num_computed=r.computed,
      max_total=r.max_total, num_in_flight=r.in_flight, num_pages=r.pages,
    )  # fmt: skip
    for name, value in values.items():
      columns[name][r.slot] = value
    await_host[r.slot] = r.await_host
    for i in range(r.pages):
      tables[r.slot, i] = pages.pop()
  free = np.asarray(pages + [0] * (config.cache.num_pages - len(pages)), np.int32)
  queue = np.full(size, size, np.int32)
  queue[: len(order)] = [r.slot for r in order]
  empty = sched.init(config)
  fields = {k: jnp.asarray(v) for k, v in columns.items()}
  fields |= dict(
    queue=jnp.asarray(queue), await_host=jnp.asarray(await_host),
    block_tables=jnp.asarray(tables.astype(np.int32)), num_submitted=jnp.int32(len(requests)),
    pool=empty.pool.__class__(free_pages=jnp.asarray(free), num_free=jnp.int32(len(pages))),
  )  # fmt: skip
  return SchedulerState(policy=sched.init(config).policy, **fields)


def random_params(rng) -> oracle.Params:
  seats = int(rng.integers(1, 7))
  return oracle.Params(
    budget=int(rng.integers(seats, 18)), max_num_seqs=seats,
    threshold=int(rng.choice([0, 0, 2, 7])), cap_when_alone=bool(rng.random() < 0.5),
    chunked=bool(rng.random() < 0.7), watermark_pages=int(rng.choice([0, 0, 3])),
  )  # fmt: skip


def compare_one_step(rng, config):
  twins = Twins(config, reachable=False)
  requests = random_requests(rng, config)
  twins.oracle.requests = requests
  twins.oracle.submitted = len(requests)
  twins.oracle.free = config.cache.num_pages - sum(r.pages for r in requests)
  twins.state = state_of(config, requests, twins.oracle._sorted(requests), rng)
  twins.check()
  decision, _ = twins.schedule(random_params(rng))
  return decision


@pytest.mark.parametrize("name", CONFIGS)
def test_one_step_from_random_states(name):
  rng, preempting, admitting = np.random.default_rng(5), 0, 0
  for _ in range(400):
    decision = compare_one_step(rng, CONFIGS[name])
    preempting += bool(decision.preempted.any())
    admitting += bool(decision.admitted.any())
  assert preempting > 20 and admitting > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_one_step_from_very_many_random_states(name):
  rng = np.random.default_rng(6)
  for _ in range(40_000):
    compare_one_step(rng, CONFIGS[name])
