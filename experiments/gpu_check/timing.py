"""Seconds of a call on the device: many calls in flight, one wait, the median of repeats."""

import statistics
import time

import jax


def seconds(call, settings):
  """Seconds of one `call`, which must return arrays without waiting for them.

  Returns:
    {"seconds": median of the repeats, "low", "high": their range, "calls": of one repeat}
  """
  jax.block_until_ready(call())
  once = min(_timed(call, 1) for _ in range(2))
  count = max(1, min(round(settings.repeat_seconds / once), 1000))
  count = max(1, min(round(settings.repeat_seconds / _timed(call, count)), 1000))
  times = [_timed(call, count) for _ in range(settings.repeats)]
  return {
    "seconds": statistics.median(times), "low": min(times), "high": max(times), "calls": count,
  }  # fmt: skip


def _timed(call, count):
  begin = time.perf_counter()
  for _ in range(count):
    out = call()
  jax.block_until_ready(out)
  return (time.perf_counter() - begin) / count
