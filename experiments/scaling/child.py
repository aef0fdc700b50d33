"""Host time of a step, measured on the jaxserve that PYTHONPATH names: one line of JSON.

Programs that run in every step are replaced by hollow ones, compiled too: the same arguments,
those kept that the real one keeps, the same ones donated, results of the same shapes, which are
those of a recorded step of decodes. A step of the engine then does all that the host does, Python,
transfers, dispatch and waiting, while nothing is computed. Run by `experiments.scaling.host`:

  python child.py '{"rows": 32, "prefix": false, "steps": 1500, "cache_dir": "...", ...}'
"""

import cProfile
import gc
import json
import pathlib
import pstats
import sys
import time

from jaxserve.engine import devices

devices.set_up()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from jaxserve import sched  # noqa: E402
from jaxserve.config import CacheConfig, SchedulerConfig  # noqa: E402
from jaxserve.engine import Engine, EngineConfig, SamplingParams, attention, compiler  # noqa: E402
from jaxserve.engine.executables import CompileReport, ExecutableTable  # noqa: E402
from jaxserve.engine.store import ExecutableStore  # noqa: E402
from jaxserve.model import llama, source  # noqa: E402

_LENGTH, _PAGE = 4096, 64
# Of a hollow program, from its arguments and the recorded results: what it returns.
_HOLLOW = {
  "schedule": lambda args, seen: (args[0], seen[1]),
  "lay_out": lambda args, seen: seen,
  "commit": lambda args, seen: (args[0], jnp.zeros_like(seen[1])),
  "forward": lambda args, seen: (seen[0], args[1], seen[2], seen[3]),
  "sample": lambda args, seen: (args[2], seen[1]),
}


class Recording:
  """A table that keeps on the host what its programs return."""

  def __init__(self, table):
    self.reports, self.seen, self._table = table.reports, {}, table

  def seal(self):
    """As of a table."""

  def __getitem__(self, key):
    compiled = self._table[key]

    def call(*args):
      result = compiled(*args)
      self.seen[key] = jax.tree.map(np.array, result)
      return result

    return call


def kept_arguments(program):
  """bool for every leaf of the arguments: whether the program reads it."""
  jaxpr = jax.make_jaxpr(program.fn)(*program.args).jaxpr
  read = {id(x) for eqn in jaxpr.eqns for x in eqn.invars} | {id(x) for x in jaxpr.outvars}
  return [id(x) in read for x in jaxpr.invars]


def hollow(program, seen):
  """A compiled program with the same arguments and results that computes nothing."""
  kept = kept_arguments(program)

  def fn(*args):
    read = [x for x, keep in zip(jax.tree.leaves(args), kept, strict=True) if keep]
    # XLA drops the product with 0; the arguments stay.
    nothing = sum(jnp.ravel(x)[0].astype(jnp.int32) for x in read) * 0
    result = _HOLLOW[program.key[0]](args, jax.tree.map(jnp.asarray, seen))
    leaves, structure = jax.tree.flatten(result)
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[smallest] = leaves[smallest] + nothing.astype(leaves[smallest].dtype)
    return jax.tree.unflatten(structure, leaves)

  return jax.jit(fn, donate_argnums=program.donate).lower(*program.args).compile()


def hollow_table(programs, real, seen):
  """A table in which whatever was seen in a step is hollow."""
  table = ExecutableTable()
  for program in programs:
    key, found = program.key, real[program.key]
    if key[0] in _HOLLOW and key in seen:
      found = hollow(program, seen[key])
    table.add(
      found,
      CompileReport(
        key=key, trace_s=0, compile_s=0, cache_hit=False, temp_bytes=0, alias_bytes=0
      ),
    )  # fmt: skip
  return table


def submit(engine, rows, steps):
  """Fills the seats, and serves the prompts."""
  for row in range(rows):
    prompt = [(row + i) % 200 for i in range(_PAGE)]
    engine.submit(prompt, SamplingParams(max_tokens=steps, ignore_eos=True))
  for _ in range(10):
    engine.step()


def microseconds(engine, steps):
  """Of every step."""
  ends = [time.perf_counter()]
  for _ in range(steps):
    engine.step()
    ends.append(time.perf_counter())
  return (1e6 * np.diff(ends)).tolist()


def build(given):
  """(config, graphdef, leaves, programs, real table)."""
  cache_dir, rows = pathlib.Path(given["cache_dir"]), given["rows"]
  checkpoint = source.load_checkpoint(given["model"], cache_dir, given["dtype"])
  graphdef, leaves = llama.load(checkpoint.config, checkpoint.params, jnp.dtype(given["dtype"]))
  config = EngineConfig(
    model=checkpoint.config, dtype=given["dtype"], token_buckets=tuple(sorted({rows, 256})),
    scheduler=SchedulerConfig(
      cache=CacheConfig(num_pages=rows * _LENGTH // _PAGE, page_size=_PAGE), max_num_seqs=rows,
      max_requests=2 * rows, max_budget=256, max_model_len=_LENGTH, prefix_cache=given["prefix"],
    ),
  )  # fmt: skip
  config = attention.resolve(config, devices.pick().model)
  programs = Engine.programs(config, graphdef, leaves)
  table = compiler.compile_all(programs, store=ExecutableStore(cache_dir / "executables"))
  return config, leaves, programs, table


def main(given):
  config, leaves, programs, table = build(given)
  params, where = sched.make_params(config.scheduler), devices.pick()
  engine = lambda of: Engine(config, leaves, of, where, params)  # noqa: E731
  recording = Recording(table)
  recorder = engine(recording)
  submit(recorder, given["rows"], 200)
  most = _LENGTH - 2 * _PAGE
  idle = engine(hollow_table(programs, table, dict(recording.seen)))
  submit(idle, given["rows"], most)
  real = engine(table)
  submit(real, given["rows"], most)
  microseconds(idle, 100), microseconds(real, 30)
  gc.collect(), gc.freeze()  # as start-up does
  host = microseconds(idle, given["steps"])
  whole = microseconds(real, given["steps"] // 5)
  found = {
    "host_us": float(np.median(host)), "host_low_us": float(np.percentile(host, 10)),
    "step_us": float(np.median(whole)), "step_low_us": float(np.percentile(whole, 10)),
  }  # fmt: skip
  if given.get("profile"):
    profile = cProfile.Profile()
    profile.runcall(microseconds, idle, given["steps"])
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)
  print(json.dumps(found))


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
