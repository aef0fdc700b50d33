"""What the last steps computed, for those who watch; and the budget, which they may change."""

import asyncio
import collections
import dataclasses
from collections.abc import AsyncIterator

import numpy as np

from jaxserve import sched
from jaxserve.engine import Engine
from jaxserve.pytree import scalar
from jaxserve.server.engine_thread import Report
from jaxserve.server.errors import invalid
from jaxserve.server.protocol import Settings, StepRecord
from jaxserve.types import SchedulerParams

_KEPT = 512
_SHOWN_REQUESTS = 24  # of a step
_PAUSE_S = 0.05  # a watcher is woken at most so often


class StepFeed:
  """A ring of records. Lives on the event loop; who watches slowly misses steps, nothing waits."""

  def __init__(self, num_pages: int):
    self._num_pages = num_pages
    self._records: collections.deque[StepRecord] = collections.deque(maxlen=_KEPT)
    self._count = 0  # records ever made
    self._done_s = 0.0
    self._news = asyncio.Event()
    self._closed = False

  def add(self, report: Report, gap_s: float) -> None:
    """Records a turn of the engine.

    Args:
      report: the turn.
      gap_s: the longest time that a stream had waited for the token it got.
    """
    events = report.events
    if events is None:
      return
    prefill = sum(part.tokens for part in events.scheduled if part.is_prefill)
    record = StepRecord(
      step=events.step,
      at_s=round(events.done_s, 4),
      budget=events.budget,
      bucket=events.bucket,
      decode=events.num_tokens - prefill,
      prefill=prefill,
      # A step that was dispatched while another ran begins when that one ends.
      ms=round(1e3 * (events.done_s - max(events.dispatched_s, self._done_s)), 3),
      gap_ms=round(1e3 * gap_s, 3),
      running=report.running,
      waiting=report.waiting,
      pages=self._num_pages - report.free_pages,
      requests=[
        (part.request_id, part.tokens, int(part.is_prefill))
        for part in events.scheduled[:_SHOWN_REQUESTS]
      ],
    )
    self._done_s = events.done_s
    self._records.append(record)
    self._count += 1
    self._news.set()

  def close(self) -> None:
    """Ends every watch."""
    self._closed = True
    self._news.set()

  async def watch(self) -> AsyncIterator[list[StepRecord]]:
    """The records there are, then new ones as they come, until `close`."""
    seen = 0
    while not self._closed:
      fresh = min(self._count - seen, len(self._records))
      seen = self._count
      records = list(self._records)
      yield records[len(records) - fresh :]
      self._news.clear()
      if seen == self._count and not self._closed:
        await self._news.wait()
      await asyncio.sleep(_PAUSE_S)


def settings_of(engine: Engine) -> Settings:
  """The budget, and between which bounds it may be changed."""
  config = engine.config.scheduler
  return Settings(
    budget=int(engine.params.budget),
    min_budget=_least_budget(engine),
    max_budget=config.max_budget,
    max_model_len=config.max_model_len,
    num_pages=config.cache.num_pages,
    vocab_size=engine.config.model.vocab_size,
  )


def params_with(engine: Engine, budget: int) -> SchedulerParams:
  """The scheduler's parameters under another budget; nothing recompiles.

  Raises:
    ApiError: it is out of bounds.
  """
  least, most = _least_budget(engine), engine.config.scheduler.max_budget
  if not least <= budget <= most:
    raise invalid("budget", f"budget={budget}: must be in [{least}, {most}]")
  return dataclasses.replace(engine.params, budget=scalar(budget, np.int32))


def _least_budget(engine: Engine) -> int:
  """One token for every seat; where prompts are not split, a whole one."""
  config, params = engine.config.scheduler, engine.params
  whole = sched.find_policy(config.policy).whole_prompts or not bool(params.chunked_prefill)
  return config.max_model_len if whole else int(params.max_num_seqs)
