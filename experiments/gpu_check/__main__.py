"""All GPU kernels checked and timed in one go: `python -m experiments.gpu_check`.

On one H100 or H200, in under 8 minutes, without a network: see README.md beside this file. On a
machine without a GPU (or with --interpret) the same code runs on tiny sizes, which shows that it
runs and measures nothing. Writes results.jsonl as it goes, and plots; prints a table last. Exits
with 1 if anything failed.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import time

from absl import app, flags

from experiments.gpu_check import config, driver, floors, records, stages
from jaxserve.engine import devices

FLAGS = flags.FLAGS
_OUTPUT = flags.DEFINE_string(
  "output_dir", str(pathlib.Path(__file__).parent / "results"), "Where the results go."
)
_SECONDS = flags.DEFINE_float("seconds", None, "Time budget. Default: 420, or 240 if interpreted.")
_RESUME = flags.DEFINE_bool("resume", False, "Leave out cases that went well with these sources.")
_INTERPRET = flags.DEFINE_bool(
  "interpret", None, "Tiny sizes in the interpreter. Default: where there is no GPU."
)
_STAGES = flags.DEFINE_list("stages", None, f"Some of {', '.join(config.STAGES)}. Default: all.")
_EXECUTABLES = flags.DEFINE_string(
  "executables", None, "A folder that keeps the executables of engines. Default: not kept."
)
_FLOORS = flags.DEFINE_bool("floors", False, "Print the tables of floors and predictions; no run.")
_RUN = flags.DEFINE_string("run", None, "Set by the parent: name of the run.")
_STAGE = flags.DEFINE_string("stage", None, "Set by the parent: the stage to run here.")


def settings_of(interpret):
  found = config.TINY if interpret else config.FULL
  wanted = _STAGES.value or config.STAGES
  unknown = sorted(set(wanted) - set(config.STAGES))
  if unknown:
    raise app.UsageError(f"stages={','.join(unknown)}: there are {', '.join(config.STAGES)}")
  return dataclasses.replace(
    found, seconds=found.seconds if _SECONDS.value is None else _SECONDS.value,
    stages=tuple(stage for stage in config.STAGES if stage in wanted),
    executables=_EXECUTABLES.value,
  )  # fmt: skip


def has_gpu():
  """Without JAX, which would take the GPU's memory in this process."""
  wanted = os.environ.get("JAX_PLATFORMS") or "cuda"
  if wanted.split(",")[0] not in ("cuda", "gpu"):
    return False
  try:
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False)
  except (OSError, subprocess.TimeoutExpired):
    return False
  return done.returncode == 0 and b"GPU" in done.stdout


def command(interpret):
  """(stage, seconds) -> the command line of a child."""
  return lambda stage, seconds: [
    sys.executable, "-m", "experiments.gpu_check", f"--output_dir={_OUTPUT.value}",
    f"--interpret={str(interpret).lower()}", f"--resume={str(_RESUME.value).lower()}",
    f"--run={_RUN.value}", f"--stage={stage}", f"--seconds={seconds:.1f}",
    *([f"--executables={_EXECUTABLES.value}"] if _EXECUTABLES.value else []),
  ]  # fmt: skip


def run_stage(interpret, results):
  """One stage, in this process."""
  settings = settings_of(interpret)
  devices.set_up()
  deadline = time.monotonic() + settings.seconds
  if not interpret and _STAGE.value not in ("torch", "others"):
    reason = stages.why_no_gpu()
    if reason:
      results.append(_STAGE.value, "start", "failed", error=reason)
      return
  if not stages.run(_STAGE.value, settings, results, deadline):
    os._exit(driver.RESTART)  # a broken device may hang in tidying up


def run_all(interpret, results):
  """Every stage: in processes of their own on a GPU, in this one if interpreted."""
  settings = settings_of(interpret)
  if interpret:
    devices.set_up()
    deadline = time.monotonic() + settings.seconds
    for stage in settings.stages:
      stages.run(stage, settings, results, deadline)
  else:
    driver.run(settings, results, command(interpret))
  from experiments.gpu_check import plot, table

  print(plot.draw(settings, results, results.path.parent))
  print(table.render(settings, results))
  failed = table.failures(results)
  print(f"{results.path}: {len(failed)} failed")
  return 1 if failed else 0


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}: everything is a --flag")
  if _FLOORS.value:
    print(floors.markdown())
    return 0
  interpret = not has_gpu() if _INTERPRET.value is None else _INTERPRET.value
  if _RUN.value is None:
    FLAGS.run = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
  path = pathlib.Path(_OUTPUT.value).expanduser() / "results.jsonl"
  results = records.Records(path, _RUN.value, _RESUME.value)
  if _STAGE.value is not None:
    run_stage(interpret, results)
    return 0
  if interpret:
    print("No GPU, or --interpret: tiny sizes; times say nothing about a GPU.")
  return run_all(interpret, results)


if __name__ == "__main__":
  app.run(main)
