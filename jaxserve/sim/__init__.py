"""The server in virtual time: the engine's scheduler, a model of how long a step takes, no model.

  params = sched.make_params(config, budget=2048)
  result = sim.simulate(load, config, params, sim.roofline(cost.LLAMA3_8B, cost.H100))
  result.summary()["p99_itl_ms"]

  batch, settings = sim.grid(config, budget=[512, 1024, 2048])
  results = sim.sweep(load, config, batch, step_time)
  results.lane(0).summary()

A step time of your own is a function from a `StepLoad` to seconds. `sim.step` is one iteration, to
be jitted, scanned or vmapped in a loop of your own.
"""

from jaxserve.sim.load import StepLoad, StepTime, per_token, roofline
from jaxserve.sim.result import SimResult
from jaxserve.sim.run import advance, grid, requests_of, simulate, sweep
from jaxserve.sim.search import Capacity, attainment, capacity
from jaxserve.sim.server import Server, SimState, init, running, step

__all__ = [
  "Capacity", "Server", "SimResult", "SimState", "StepLoad", "StepTime", "advance", "attainment",
  "capacity", "grid", "init", "per_token", "requests_of", "roofline", "running", "simulate",
  "step", "sweep",
]  # fmt: skip
