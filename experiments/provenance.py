"""What a recorded result must carry: commit, versions, machine, date."""

import json
import os
import pathlib
import subprocess
import time

import jax


def collect():
  command = ["git", "rev-parse", "--short", "HEAD"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  return {
    "commit": done.stdout.strip() or "unknown",
    "jax": jax.__version__,
    "device": jax.devices()[0].device_kind,
    "cores": os.cpu_count(),
    "date": time.strftime("%Y-%m-%d"),
  }


def load_average():
  """Of the last minute; what else the machine was doing while something was measured."""
  return round(os.getloadavg()[0], 2)


def append(main_file, result):
  """Adds one line to results/results.jsonl beside an experiment's main file."""
  path = pathlib.Path(main_file).parent / "results" / "results.jsonl"
  path.parent.mkdir(exist_ok=True)
  with path.open("a") as file:
    file.write(json.dumps(result) + "\n")
