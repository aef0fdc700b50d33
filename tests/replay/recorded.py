"""A recording of a tiny engine in which everything happens that a recording can hold."""

import dataclasses
import functools

import numpy as np

from jaxserve import sched
from jaxserve.engine import SamplingParams
from jaxserve.replay import recording
from jaxserve.replay.recorder import Recorder
from tests.testing.engines import SCHEDULER, tiny_engine

RNG = np.random.default_rng(3)
LONG = [RNG.integers(0, 61, n).tolist() for n in (33, 30, 17, 22, 9)]
SALT = "5a" * 16


def engine():
  """By priority; idle, with its widest budget."""
  one = tiny_engine(scheduler=dataclasses.replace(SCHEDULER, ordering="priority"))
  one.set_params(sched.make_params(SCHEDULER))
  one.guard.count = 0  # what other engines compiled meanwhile is not this one's
  return one


def run_dry(engine):
  while not engine.is_idle:
    engine.step()


def _first_run(recorder):
  """Preemption, an abort with a step in flight, seeds, priorities, a stop, another budget."""
  engine = recorder.engine
  for number, prompt in enumerate(LONG):
    recorder.submit(f"long-{number}", prompt, SamplingParams(max_tokens=25), priority=number)
  for _ in range(3):
    engine.step()
  hot = SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=7)
  recorder.submit("seeded", [1, 2, 3], hot, priority=-1)
  recorder.submit("drawn", [4], SamplingParams(max_tokens=9, temperature=1.5))
  for _ in range(4):
    engine.step()
  assert recorder.abort("long-2")
  engine.set_params(sched.make_params(SCHEDULER, budget=9))
  some = SamplingParams(
    max_tokens=20, temperature=1.0, seed=2**33 + 1, stop_token_ids=tuple(range(40))
  )
  engine.submit([5, 6], some, priority=-2)
  run_dry(engine)


@functools.cache
def lines():
  """Two runs as the lines of a file."""
  one, events = engine(), []
  recorder = Recorder(one, "tiny", events.append, SALT)
  one.set_params(sched.make_params(SCHEDULER, budget=30))
  with recorder.run("first", "vllm_v1"):
    _first_run(recorder)
  one.set_params(sched.make_params(SCHEDULER, budget=61, chunked_prefill=False))
  with recorder.run("second", "vllm_v1"):
    one.generate(LONG[:3], SamplingParams(max_tokens=4))
    run_dry(one)
  return tuple(recording.to_line(event) for event in events)


def record():
  return recording.parse("".join(lines()))
