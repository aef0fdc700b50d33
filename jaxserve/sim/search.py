"""How much load a configuration carries within its objectives."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxserve import metrics
from jaxserve.config import SchedulerConfig
from jaxserve.sim.load import StepTime
from jaxserve.sim.result import SimResult
from jaxserve.sim.run import simulate
from jaxserve.types import SchedulerParams
from jaxserve.workload import Workload

_WIDEST = 2.0**10


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Capacity:
  """The highest rate found that meets the objectives.

  Attributes:
    rate: requests a second; 0 if none does.
    factor: of the workload's own rate.
    result: the simulation at that rate; None if none does.
  """

  rate: float
  factor: float
  result: SimResult | None


def attainment(result: SimResult, slo: metrics.Slo) -> float:
  """Share of the requests that keep every objective, of a result without lanes."""
  return float(np.mean([metrics.meets(request, slo) for request in result.requests()]))


def capacity(
  workload: Workload, config: SchedulerConfig, params: SchedulerParams, step_time: StepTime, *,
  slo: metrics.Slo, share: float = 0.99, tolerance: float = 0.02, overlap: bool = True,
  buckets: tuple[int, ...] = (),
) -> Capacity:  # fmt: skip
  """The highest rate at which a share of the requests keeps its objectives.

  Args:
    workload: whose rate is scaled.
    config: of the scheduler.
    params: of the scheduler.
    step_time: as in `simulate`.
    slo: objectives of a request.
    share: of the requests that must keep all of them.
    tolerance: relative width of the interval at which to stop.
    overlap: as in `simulate`.
    buckets: as in `simulate`.

  Returns:
    Capacity, see `highest_rate`.

  Cost: some ten simulations, compiled once.
  Source: Vidur (MLSys 2024), capacity search.
  """
  return highest_rate(
    workload,
    lambda load: simulate(load, config, params, step_time, overlap=overlap, buckets=buckets),
    lambda result: attainment(result, slo) >= share,
    tolerance=tolerance,
  )


def highest_rate(
  workload: Workload, serve: Callable[[Workload], SimResult],
  accepts: Callable[[SimResult], bool], *, tolerance: float = 0.02,
) -> Capacity:  # fmt: skip
  """Bisects on the rate of the workload, by scaling its arrival times.

  Doubles or halves the rate until it is accepted at one rate and refused at twice of it, then
  halves the interval. Takes for granted that a lower rate is accepted where a higher one is.

  Args:
    workload: whose rate is scaled.
    serve: simulates a workload on whatever is examined: one server, a fleet, two pools.
    accepts: whether a simulation keeps the objectives.
    tolerance: relative width of the interval at which to stop.

  Returns:
    Capacity, its factor within [1/1024, 1024]; factor 0 if even the lowest is too much.
  """
  found: dict[float, SimResult] = {}

  def meets(factor: float) -> bool:
    result = serve(workload.faster(factor))
    good = accepts(result)
    if good:
      found[factor] = result
    return good

  low, high = _bracket(meets)
  while low > 0 and high < float("inf") and high / low > 1 + tolerance:
    middle = (low * high) ** 0.5
    low, high = (middle, high) if meets(middle) else (low, middle)
  return Capacity(rate=low * workload.rate, factor=low, result=found.get(low))


def _bracket(meets: Callable[[float], bool]) -> tuple[float, float]:
  """(a factor that is met or 0, one that is missed or infinity)."""
  factor = 1.0
  if meets(factor):
    while factor < _WIDEST:
      if not meets(2 * factor):
        return factor, 2 * factor
      factor *= 2
    return factor, float("inf")
  while factor > 1 / _WIDEST:
    factor /= 2
    if meets(factor):
      return factor, 2 * factor
  return 0.0, factor
