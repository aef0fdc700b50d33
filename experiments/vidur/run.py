"""Both simulators on the same requests, in turn, so that a busy machine slows both."""

import csv
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

from jaxserve import cost, sched, sim
from jaxserve.config import CacheConfig, SchedulerConfig

CHILD = pathlib.Path(__file__).with_name("child.py")
SEATS, LONGEST, PAGE_SIZE, PAGES = 64, 4096, 16, 24_000


def write_trace(load, path):
  """The columns that Vidur reads."""
  with path.open("w", newline="") as file:
    out = csv.writer(file)
    out.writerow(["Time", "PromptTokenCount", "CompletionTokenCount", "Date"])
    rows = zip(load.arrival_s, load.num_prompt, load.num_output, strict=True)
    out.writerows([float(t), int(p), int(o), "all"] for t, p, o in rows)


def ours(load, budget):
  """A dict of steps, seconds without compilation, and the virtual second of the last token."""
  config = SchedulerConfig(
    cache=CacheConfig(num_pages=PAGES, page_size=PAGE_SIZE), max_num_seqs=SEATS,
    max_requests=4 * SEATS, max_budget=budget, max_model_len=LONGEST, policy="sarathi",
  )  # fmt: skip
  params, step_time = sched.make_params(config), sim.roofline(cost.LLAMA3_8B, cost.H100)
  begin = []
  note = lambda submitted: begin or begin.append(time.perf_counter())
  result = sim.simulate(load, config, params, step_time, overlap=False, on_progress=note)
  seconds = time.perf_counter() - begin[0]
  return {"steps": int(result.steps), "seconds": seconds, "end_s": float(result.token_s.max())}


def vidurs(python, load, budget):
  """The same of Vidur."""
  with tempfile.TemporaryDirectory() as folder:
    trace = pathlib.Path(folder) / "trace.csv"
    write_trace(load, trace)
    command = [python, CHILD, trace, budget, SEATS, LONGEST, pathlib.Path(folder) / "out"]
    done = subprocess.run(
      [*map(str, command)], capture_output=True, text=True, check=False, cwd=folder,
      env={"WANDB_MODE": "disabled", "PATH": "/usr/bin:/bin", "HOME": folder},
    )  # fmt: skip
  if done.returncode:
    raise RuntimeError(f"vidur ended with {done.returncode}: {done.stderr[-500:]}")
  return json.loads(done.stdout.splitlines()[-1])


def compare(python, load, budget, repeats):
  """Medians of `repeats` runs of each, taken in turn."""
  pairs = [(ours(load, budget), vidurs(python, load, budget)) for _ in range(repeats)]
  rows = {}
  for name, runs in zip(("jaxserve", "vidur"), zip(*pairs, strict=True), strict=True):
    seconds = statistics.median(run["seconds"] for run in runs)
    rows[name] = {**runs[0], "seconds": seconds, "steps_per_s": runs[0]["steps"] / seconds}
  return rows
