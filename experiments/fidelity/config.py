"""The engine, the load, and how often both are run."""

import dataclasses

import numpy as np

from experiments.calibrate import config as calibrate_config
from jaxserve import workload
from jaxserve.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Live runs at shares of what the engine can carry.

  Attributes:
    engine: that is calibrated and run; its rounds are one for each repeat.
    requests: of a run.
    shares: rates of arrival, as shares of the rate at which a burst is served.
    prompt: median of the lognormal prompts.
    output: median of the lognormal outputs.
    repeats: live runs of every load.
    seed: of arrivals and lengths.
  """

  engine: calibrate_config.Config = calibrate_config.Config()
  requests: int = 30
  shares: tuple[float, ...] = (0.3, 0.6, 0.9)
  prompt: int = 120
  output: int = 24
  repeats: int = 3
  seed: int = 0


def burst(config) -> Workload:
  """All requests at once: what is served in the shortest time."""
  rng, longest = np.random.default_rng(config.seed), config.engine.length // 2
  count = config.requests
  return Workload(
    arrival_s=np.zeros(count),
    num_prompt=workload.lognormal(rng, count, median=config.prompt, sigma=0.7, high=longest),
    num_output=workload.lognormal(rng, count, median=config.output, sigma=0.5, low=4, high=longest),
  )


def arriving(config, rate) -> Workload:
  """The same requests, by a Poisson process: the same arrivals at every rate, but for the scale."""
  rng = np.random.default_rng(config.seed + 1)
  times = workload.poisson_arrivals(rng, config.requests, rate=1.0)
  return dataclasses.replace(burst(config), arrival_s=(times - times[0]) / rate)
