"""Runs every stage in a process of its own, so that a hang or a crash costs one case only."""

import os
import signal
import subprocess
import time

from experiments.gpu_check.config import SHARES

# Exit code of a stage that recorded its error and wants a fresh process for the rest.
RESTART = 75

_POLL = 0.2
_GRACE = 30  # seconds over the budget that a case which began in time may take
_STARTS = 6  # of one stage: each further one follows a case that hung or crashed


def run(settings, records, command, log=print):
  """Runs all stages within the time budget.

  Args:
    settings: of the run.
    records: results so far.
    command: (stage, seconds) -> the command line of a process that runs the stage so long.
    log: where to say what happens.
  """
  end = time.monotonic() + settings.seconds
  for stage in settings.stages:
    left = end - time.monotonic()
    if left < 5:
      log(f"{stage}: no time left")
      records.append(stage, "all", "no time")
      continue
    log(f"{stage} ({left:.0f} s left)")
    _run_stage(stage, settings, records, command, end, log)


def _run_stage(stage, settings, records, command, end, log):
  limit = settings.case_seconds.get(stage, settings.case_seconds[""])
  stop = min(end, time.monotonic() + SHARES[stage] * settings.seconds)
  for _ in range(_STARTS):
    seconds = stop - time.monotonic()
    if seconds <= 0:
      return
    code, late = _watch(command(stage, seconds), records, limit, end + _GRACE)
    if code == 0 and not late:
      return
    case = records.begun(stage)
    reason = f"no result for {limit} s" if late else f"the process ended with code {code}"
    if case is not None:
      records.append(stage, case, "failed", error=reason)
    elif late or code != RESTART:
      records.append(stage, "start", "failed", error=reason)
      log(f"{stage}: did not start: {reason}")
      return
    log(f"{stage}: {case or 'its last case'} took the process with it ({reason}); starting again")


def _watch(command, records, limit, end):
  """(exit code, whether it was ended because its results stopped coming or time was up)."""
  process = subprocess.Popen(command, start_new_session=True)
  size, since = _size(records.path), time.monotonic()
  while process.poll() is None:
    time.sleep(_POLL)
    if _size(records.path) != size:
      size, since = _size(records.path), time.monotonic()
    if time.monotonic() > min(since + limit, end):
      os.killpg(process.pid, signal.SIGKILL)
      return process.wait(), True
  return process.returncode, False


def _size(path):
  return path.stat().st_size if path.exists() else 0
