"""The engine that is measured."""

import dataclasses
import pathlib

from jaxserve.engine import startup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which engine, and how often every plan is measured.

  Attributes:
    model: as for jaxserve.main.
    dtype: of weights, products and KV.
    budget: most tokens of a step.
    seats: requests running at once.
    length: most tokens of a request.
    page_size: tokens of a KV page.
    rounds: of all plans.
    cache_dir: as for jaxserve.main.
  """

  model: str = "smollm2-135m"
  dtype: str = "bfloat16"
  budget: int = 256
  seats: int = 8
  length: int = 1024
  page_size: int = 64
  rounds: int = 3
  cache_dir: str = "~/.cache/jaxserve"


def start(config):
  """The engine, warmed up. JAX must not have started: see `engine.devices.set_up`."""
  if config.budget < config.seats:
    raise ValueError(f"budget={config.budget}: must be at least max_num_seqs={config.seats}")
  if config.length < 128:
    raise ValueError(f"max_model_len={config.length}: must be at least 128 to tell costs apart")
  started = startup.start(
    startup.StartOptions(
      model=config.model, cache_dir=pathlib.Path(config.cache_dir).expanduser(),
      dtype=config.dtype, budget=config.budget, max_num_seqs=config.seats,
      max_model_len=config.length, page_size=config.page_size,
      kv_cache_tokens=(config.seats + 1) * -(-config.length // config.page_size) * config.page_size,
    )
  )  # fmt: skip
  started.engine.warm_up()
  return started
