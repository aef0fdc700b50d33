"""The engine: a real model behind the pure scheduler, every executable compiled before it serves.

`Engine.build` compiles a sealed table of executables; `submit`, `abort` and `step` drive it, one
step of overlap deep; `generate` runs prompts to their end.
"""

from jaxserve.engine.config import EngineConfig, token_buckets
from jaxserve.engine.engine import Engine, QueueFullError
from jaxserve.engine.request import Completion, Listener, SamplingParams, StepEvents

__all__ = [
  "Completion", "Engine", "EngineConfig", "Listener", "QueueFullError", "SamplingParams",
  "StepEvents", "token_buckets",
]  # fmt: skip
