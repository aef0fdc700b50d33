"""Progress that suits the reader: a tqdm bar on a terminal, a few log lines anywhere else."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from absl import logging

_LOG_EVERY = 0.25
_BYTES_PER_MB = 1e6


class Progress:
  """Counts `advance`d units up to `total` and shows them. Made by `progress`."""

  def __init__(self, total: int, unit: str, desc: str, bar: Any | None):
    self._total, self._unit, self._desc, self._bar = total, unit, desc, bar
    self._done = 0
    self._next_log = _LOG_EVERY

  def advance(self, count: int = 1, note: str = "") -> None:
    """Adds `count` units; `note` says what they were (a bucket, a file)."""
    self._done += count
    if self._bar is not None:
      if note:
        self._bar.set_postfix_str(note, refresh=False)
      self._bar.update(count)
      return
    share = self._done / max(self._total, 1)
    if share < self._next_log:
      return
    self._next_log = (share // _LOG_EVERY + 1) * _LOG_EVERY
    suffix = f" ({note})" if note else ""
    logging.info("%s: %d%%, %s%s", self._desc, min(round(100 * share), 100), self._amount(), suffix)

  def _amount(self) -> str:
    if self._unit == "B":
      return f"{self._done / _BYTES_PER_MB:.0f} of {self._total / _BYTES_PER_MB:.0f} MB"
    return f"{self._done} of {self._total} {self._unit}"


@contextlib.contextmanager
def progress(total: int, unit: str, desc: str) -> Iterator[Progress]:
  """Shows `desc` advancing to `total`.

  Args:
    total: units of work.
    unit: what is counted; "B" is shown as megabytes.
    desc: what is being done, as a short phrase ("Loading weights").

  Yields:
    A `Progress`; call its `advance`. On a terminal it draws a bar on stderr, elsewhere it logs at
    every quarter.
  """
  if not sys.stderr.isatty():
    yield Progress(total, unit, desc, None)
    return
  import tqdm

  with tqdm.tqdm(total=total, unit=unit, unit_scale=unit == "B", desc=desc) as bar:
    yield Progress(total, unit, desc, bar)
