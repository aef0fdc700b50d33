"""The only file below main that reads a clock."""

import datetime
import time


def now() -> float:
  """Seconds on a monotonic clock; only differences mean anything."""
  return time.perf_counter()


def sleep_until(deadline: float) -> None:
  """Returns at `deadline`, on the clock of `now`."""
  time.sleep(max(deadline - now(), 0.0))


def wall() -> float:
  """Seconds since 1970, for people and protocols."""
  return time.time()


def local_now() -> datetime.datetime:
  """Date and time here, for texts that print them."""
  return datetime.datetime.now()
