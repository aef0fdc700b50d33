"""Host time of a step, by `child.py`, of this checkout and of another one in turn."""

import json
import os
import pathlib
import statistics
import subprocess
import sys

from experiments import provenance

_CHILD = pathlib.Path(__file__).with_name("child.py")
_HERE = pathlib.Path(__file__).parents[2]


def measure(config, on_round=lambda count: None):
  """One row for rows x prefix cache x checkout: the least of the rounds' medians."""
  checkouts = {"this": _HERE} | ({"base": pathlib.Path(config.base)} if config.base else {})
  settings = [(config.rows[-1], prefix) for prefix in (False, True)]
  found = {}
  for _ in range(config.host_rounds):
    for rows, prefix in settings:
      for name, checkout in checkouts.items():
        one = run_child(checkout, config, rows, prefix)
        found.setdefault((rows, prefix, name), []).append(one)
        on_round(1)
  return [
    {"part": "host", "rows": rows, "prefix_cache": prefix, "checkout": name}
    | {key: min(one[key] for one in ones) for key in ones[0]}
    | {"rounds_us": [round(one["host_us"]) for one in ones]}
    | {"commit": commit(checkouts[name]), "load_average": provenance.load_average()}
    | {"host_median_us": statistics.median(one["host_us"] for one in ones)}
    for (rows, prefix, name), ones in found.items()
  ]


def run_child(checkout, config, rows, prefix, steps=None):
  """What one process with that checkout's jaxserve measures.

  Raises:
    OSError: it failed.
  """
  given = {
    "rows": rows, "prefix": prefix, "steps": steps or config.host_steps, "model": config.model,
    "dtype": config.dtype, "cache_dir": str(config.cache_dir),
  }  # fmt: skip
  environment = os.environ | {"PYTHONPATH": str(checkout)}  # noqa: TID251
  done = subprocess.run(
    [sys.executable, str(_CHILD), json.dumps(given)], capture_output=True, text=True, check=False,
    env=environment,
  )  # fmt: skip
  if done.returncode:
    raise OSError(f"host: {checkout}: {done.stderr.strip().splitlines()[-1:]}")
  return json.loads(done.stdout.splitlines()[-1])


def commit(checkout):
  """Of a checkout; its name where it is none."""
  command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  return done.stdout.strip() or checkout.name
