"""Runs the cases of a stage one after another, records each, and never lets one stop the rest.

A stage is a module with `cases(settings, records)`, which yields (name, call); call() returns the
values to record, and raises `Absent` where something that it needs is not there.
"""

import importlib
import time
import traceback

MODULES = {
  "machine": "experiments.gpu_check.machine",
  "numerics": "experiments.gpu_check.numerics",
  "engine": "experiments.gpu_check.engines",
  "decode": "experiments.gpu_check.decode",
  "prefill": "experiments.gpu_check.prefill",
  "serving": "experiments.gpu_check.serving",
  "torch": "experiments.gpu_check.torch_sdpa",
  "cudnn": "experiments.gpu_check.cudnn",
  "others": "experiments.gpu_check.others",
}
# After one of these no further call of this process to the device can be trusted.
_POISONED = ("CUDA_ERROR", "illegal ", "device-side", "unspecified launch failure")


class Absent(Exception):
  """A library or a feature that a case needs is not there; not a failure."""


class Failed(Exception):
  """The case ran and its result is wrong; `values` are recorded."""

  def __init__(self, reason, **values):
    super().__init__(reason)
    self.values = values


def why_no_gpu():
  """Why JAX cannot use a GPU here, or None: full sizes on a CPU would take for ever."""
  import jax

  platform = jax.devices()[0].platform
  if platform == "gpu":
    return None
  return f"JAX uses the {platform}, not a GPU: is its CUDA plugin there?"


def run(stage, settings, records, deadline):
  """Runs what is left of a stage until `deadline` (of `time.monotonic`).

  Returns:
    False if the device cannot be trusted any more, and the rest needs a new process.
  """
  try:
    cases = list(importlib.import_module(MODULES[stage]).cases(settings, records))
  except Exception as error:  # of any kind: other stages must run
    records.append(stage, "set up", "failed", error=_describe(error))
    return True
  for name, call in cases:
    if records.is_done(stage, name):
      continue
    if time.monotonic() > deadline:
      records.append(stage, name, "no time")
      continue
    if not _run_case(stage, name, call, records):
      return False
  return True


def _run_case(stage, name, call, records):
  records.append(stage, name, "begin")
  begin = time.monotonic()
  took = lambda: round(time.monotonic() - begin, 2)
  try:
    values = call()
    records.append(stage, name, "ok", **values, took_s=took())
  except Absent as error:
    records.append(stage, name, "absent", error=str(error), took_s=took())
  except Failed as error:
    values = error.values
    records.append(stage, name, "failed", error=str(error), **values, took_s=took())
  except Exception as error:  # of any kind: the next case may do better
    text = _describe(error)
    records.append(stage, name, "failed", error=text, took_s=took())
    return settled(text)
  return True


def settled(text):
  """Whether a process may go on after an error with this text."""
  return not any(word in text for word in _POISONED)


def _describe(error):
  where = traceback.extract_tb(error.__traceback__)[-1]
  return f"{type(error).__name__}: {str(error)[:700]} ({where.filename}:{where.lineno})"
