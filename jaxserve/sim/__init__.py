"""The server in virtual time: the engine's scheduler, a model of how long a step takes, no model.

  params = sched.make_params(config, budget=2048)
  result = sim.simulate(load, config, params, sim.roofline(cost.LLAMA3_8B, cost.H100))
  result.summary()["p99_itl_ms"]

  batch, settings = sim.grid(config, budget=[512, 1024, 2048])
  results = sim.sweep(load, config, batch, step_time)
  results.lane(0).summary()

  fleet = sim.Fleet(config=config, params=params, step_time=step_time, replicas=4)
  sim.serve(load, fleet).result.summary()
  link = sim.Link(bytes_per_token=131_072, bytes_per_s=50e9)
  sim.disaggregate(load, prefill_fleet, decode_fleet, link).result.summary()

A step time of your own is a function from a `StepLoad` to seconds. `sim.step` is one iteration, to
be jitted, scanned or vmapped in a loop of your own.
"""

from jaxserve.sim.disaggregate import Disaggregated, Link, disaggregate
from jaxserve.sim.fleet import Fleet, FleetResult, serve
from jaxserve.sim.load import StepLoad, StepTime, per_token, profiled, roofline
from jaxserve.sim.result import SimResult
from jaxserve.sim.run import advance, grid, requests_of, simulate, sweep
from jaxserve.sim.search import Capacity, attainment, capacity, highest_rate
from jaxserve.sim.server import Server, SimState, init, running, step
from jaxserve.sim.tables import Table

__all__ = [
  "Capacity", "Disaggregated", "Fleet", "FleetResult", "Link", "Server", "SimResult", "SimState",
  "StepLoad", "StepTime", "Table", "advance", "attainment", "capacity", "disaggregate", "grid",
  "highest_rate", "init", "per_token", "profiled", "requests_of", "roofline", "running", "serve",
  "simulate", "step", "sweep",
]  # fmt: skip
