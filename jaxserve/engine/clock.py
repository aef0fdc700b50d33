"""The only file below main that reads a clock."""

import time


def now() -> float:
  """Seconds on a monotonic clock; only differences mean anything."""
  return time.perf_counter()


def sleep_until(deadline: float) -> None:
  """Returns at `deadline`, on the clock of `now`."""
  time.sleep(max(deadline - now(), 0.0))
