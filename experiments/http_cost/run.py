"""The same load on the engine alone and through HTTP, in turns; times are the engine's own.

A step's period is the time between the ends of two steps that serve all streams and nothing else,
of a run their lower quartile. A stall is the longest time between two steps that bring outputs,
while the long prompt is there. Everything runs `repeats` times in a round, in turns, and the least
counts: what else the machine does only adds. Medians are over rounds.
"""

import asyncio
import contextlib
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import threading

import numpy as np

from jaxserve import sched, server
from jaxserve.engine import SamplingParams
from jaxserve.progress import progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The first questions: streams, tokens, idle; the last: few streams, a long prompt."""

  rounds: int = 5
  repeats: int = 3
  streams: int = 32
  tokens: int = 120
  idle: int = 1000
  few: int = 8
  long: int = 3700
  budget: int = 128


class Watch:
  """A listener that keeps when steps ended and what they brought."""

  def __init__(self):
    self.steps = []

  def on_submit(self, *_):
    pass

  on_abort = on_params = on_submit

  def on_step(self, events):
    prefill = any(part.is_prefill for part in events.scheduled)
    self.steps.append((events.done_s, len(events.outputs), prefill))

  def periods(self, streams):
    """Milliseconds between the ends of steps of all streams and nothing else."""
    plain = [done for done, outputs, prefill in self.steps if outputs == streams and not prefill]
    return 1e3 * np.diff(plain)

  def stall(self):
    """Milliseconds of the longest gap between outputs, first prompts left out."""
    ends = [done for done, outputs, _ in self.steps if outputs]
    return float(1e3 * np.diff(ends[3:]).max())


def load_of(streams, tokens, idle=0, long=0):
  return {"streams": streams, "tokens": tokens, "idle": idle, "long": long}


@contextlib.contextmanager
def watched(engine):
  watch = engine.listener = Watch()
  try:
    yield watch
  finally:
    engine.listener = None


def alone(engine, load):
  """The load by a loop over `step`."""
  sampling = SamplingParams(max_tokens=load["tokens"], ignore_eos=True)
  with watched(engine) as watch:
    first = [engine.submit([1 + i % 200], sampling) for i in range(load["streams"])][0]
    seen, waiting = 0, load["long"]
    while (events := engine.step()) is not None:
      seen += sum(event.request_id == first for event in events.outputs)
      if waiting and seen >= 20:
        engine.submit([1 + i * 7 % 200 for i in range(waiting)], SamplingParams(max_tokens=1))
        waiting = 0
  return watch


def through_http(served, load):
  """The load by a client in a process of its own."""
  options = server.ServerOptions(port=0)
  sock, ready, started = server.listen(options), threading.Event(), []

  def on_ready(stop):
    started.extend((asyncio.get_running_loop(), stop))
    ready.set()

  port = sock.getsockname()[1]
  thread = threading.Thread(target=server.serve, args=(served, options, sock, on_ready))
  with watched(served.engine) as watch:
    thread.start()
    ready.wait()
    command = "from experiments.http_cost import client; client.main()"
    arguments = [f"http://127.0.0.1:{port}", json.dumps(load)]
    subprocess.run([sys.executable, "-c", command, *arguments], check=True)
    loop, stop = started
    loop.call_soon_threadsafe(stop, "the end")
    thread.join()
  return watch


def execute(config, served):
  """One row a question."""
  _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
  engine = served.engine
  rows = []
  with progress(config.rounds, "rounds", "Measuring") as bar:
    for number in range(config.rounds):
      rows.append(_round(config, served, turned=number % 2 == 1))
      bar.advance(1)
  assert engine.retraces == 0, "something compiled"
  return {"measured": rows} | _medians(config, rows)


def _round(config, served, turned):
  """Lists of what was measured, by what."""
  engine, row = served.engine, {}
  shapes = engine.config.scheduler
  chunked = sched.make_params(shapes, budget=config.budget)
  whole = sched.make_params(shapes, budget=shapes.max_budget, chunked_prefill=False)
  load = load_of(config.streams, config.tokens)
  period = lambda watch: float(np.percentile(watch.periods(config.streams), 25))
  few = load_of(config.few, config.tokens, long=config.long)
  stall = lambda watch: watch.stall()
  kinds = [
    ("engine_ms", chunked, period, lambda: alone(engine, load)),
    ("http_ms", chunked, period, lambda: through_http(served, load)),
    ("http_idle_ms", chunked, period, lambda: through_http(served, load | {"idle": config.idle})),
    ("engine_chunked_ms", chunked, stall, lambda: alone(engine, few)),
    ("engine_unchunked_ms", whole, stall, lambda: alone(engine, few)),
    ("http_chunked_ms", chunked, stall, lambda: through_http(served, few)),
    ("http_unchunked_ms", whole, stall, lambda: through_http(served, few)),
  ]
  for repeat in range(config.repeats):
    for name, params, measure, call in reversed(kinds) if turned ^ (repeat % 2 == 1) else kinds:
      engine.set_params(params)
      row.setdefault(name, []).append(round(measure(call()), 3))
  return row


def _medians(config, rows):
  least = [{name: min(values) for name, values in row.items()} for row in rows]
  of = lambda function: statistics.median(map(function, least))
  gain = lambda kind: of(lambda row: row[f"{kind}_unchunked_ms"] / row[f"{kind}_chunked_ms"])
  found = {
    **{name: of(lambda row, name=name: row[name]) for name in least[0]},
    "overhead_ms": of(lambda row: row["http_ms"] - row["engine_ms"]),
    "idle_ratio": of(lambda row: row["http_idle_ms"] / row["http_ms"]),
    "engine_gain": gain("engine"), "http_gain": gain("http"),
    "gain_kept": gain("http") / gain("engine"),
  }  # fmt: skip
  return dataclasses.asdict(config) | {key: round(value, 3) for key, value in found.items()}
