"""The engine on a thread of its own: commands go in by a queue, one report comes out per step.

The thread does nothing but submit, abort and step. Text, stop strings and statistics are the
business of whoever takes the reports, on another thread, while the device computes.
"""

import dataclasses
import heapq
import queue
import threading
from collections.abc import Callable

from absl import logging

from jaxserve.engine import Engine, QueueFullError, SamplingParams, StepEvents
from jaxserve.engine.request import Constraint, TokenEvent
from jaxserve.types import SchedulerParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
  """A request on its way into the engine. Tickets are never used twice."""

  ticket: int
  prompt: tuple[int, ...]
  sampling: SamplingParams
  priority: int = 0
  constraint: Constraint | None = None


@dataclasses.dataclass(frozen=True)
class _Abort:
  ticket: int


@dataclasses.dataclass(frozen=True)
class _SetParams:
  params: SchedulerParams
  on_done: Callable[[], object]


class _Stop:
  pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What one turn of the loop brought.

  Attributes:
    events: of the step that was read; None if none ran.
    tokens: its outputs by ticket, in order, without those of aborted requests.
    admitted: tickets that were first scheduled in it.
    refused: tickets that the engine did not take, and why.
    running: requests in the engine that have been scheduled.
    waiting: requests that have not.
    free_pages: of the KV pool.
  """

  events: StepEvents | None
  tokens: tuple[tuple[int, TokenEvent], ...]
  admitted: tuple[int, ...]
  refused: tuple[tuple[int, Exception], ...]
  running: int
  waiting: int
  free_pages: int


class EngineThread:
  """Runs an engine. Every method may be called from any thread."""

  def __init__(
    self,
    engine: Engine,
    on_report: Callable[[Report], None],
    on_death: Callable[[Exception], None],
  ):
    """Takes the engine over; nobody else may use it until `join` returned.

    Args:
      engine: an idle one.
      on_report: called on the engine's thread, in order.
      on_death: called on it, once, if the engine raises; nothing follows.
    """
    self._engine, self._on_report, self._on_death = engine, on_report, on_death
    self._commands: queue.SimpleQueue[Submission | _Abort | _SetParams | _Stop] = (
      queue.SimpleQueue()
    )
    self._waiting: dict[int, Submission] = {}  # not yet in the engine
    self._order: list[tuple[int, int]] = []  # heap of (priority, ticket) over _waiting
    self._tickets: dict[int, int] = {}  # engine's request id -> ticket
    self._ids: dict[int, int] = {}  # ticket -> engine's request id
    self._running: set[int] = set()  # tickets
    self._refused: list[tuple[int, Exception]] = []
    self._stopping = False
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

  def start(self) -> None:
    """Begins to serve."""
    self._thread.start()

  def submit(self, submission: Submission) -> None:
    """Hands a request over; it waits here until the engine has a slot."""
    self._commands.put(submission)

  def abort(self, ticket: int) -> None:
    """Ends a request, wherever it is; unknown tickets are ignored."""
    self._commands.put(_Abort(ticket))

  def set_params(self, params: SchedulerParams, on_done: Callable[[], object]) -> None:
    """Changes the scheduler's parameters; `on_done` is called on the engine's thread afterwards."""
    self._commands.put(_SetParams(params, on_done))

  def stop(self) -> None:
    """Aborts everything, then ends the thread. The step in flight is waited for."""
    self._commands.put(_Stop())

  def join(self, timeout_s: float | None = None) -> bool:
    """Waits for the thread to end; False if it did not in time."""
    self._thread.join(timeout_s)
    return not self._thread.is_alive()

  def _run(self) -> None:
    try:
      while not self._stopping:
        self._take_commands()
        self._admit()
        self._on_report(self._report(self._engine.step()))
      while self._engine.step() is not None:  # what was in flight
        pass
    except Exception as error:
      logging.exception("The engine failed")
      self._on_death(error)

  def _take_commands(self) -> None:
    """Carries out what has come in; waits for something when there is nothing else to do."""
    wait = self._engine.is_idle and not self._waiting
    while True:
      try:
        command = self._commands.get(block=wait)
      except queue.Empty:
        return
      wait = False
      match command:
        case Submission():
          self._waiting[command.ticket] = command
          heapq.heappush(self._order, (command.priority, command.ticket))
        case _Abort():
          self._drop(command.ticket)
        case _SetParams():
          self._engine.set_params(command.params)
          command.on_done()
        case _Stop():
          self._stopping = True
          for ticket in (*self._waiting, *self._ids):
            self._drop(ticket)

  def _drop(self, ticket: int) -> None:
    if self._waiting.pop(ticket, None) is not None:
      return
    request_id = self._ids.pop(ticket, None)
    if request_id is not None:
      del self._tickets[request_id]
      self._running.discard(ticket)
      self._engine.abort(request_id)

  def _admit(self) -> None:
    """Moves waiting requests into the engine's slots, most urgent first."""
    engine = self._engine
    while self._order and engine.num_requests < engine.config.scheduler.max_requests:
      submission = self._waiting.get(self._order[0][1])
      if submission is not None:
        try:
          request_id = engine.submit(
            submission.prompt, submission.sampling, priority=submission.priority,
            constraint=submission.constraint,
          )  # fmt: skip
        except QueueFullError:
          return
        except (ValueError, OverflowError) as error:
          self._refused.append((submission.ticket, error))
        else:
          self._tickets[request_id] = submission.ticket
          self._ids[submission.ticket] = request_id
        del self._waiting[submission.ticket]
      heapq.heappop(self._order)

  def _report(self, events: StepEvents | None) -> Report:
    tickets = self._tickets
    tokens, admitted = [], []
    for request_id in events.admitted if events else ():
      if request_id in tickets:
        admitted.append(tickets[request_id])
    self._running.update(admitted)
    for event in events.outputs if events else ():
      ticket = tickets.get(event.request_id)
      if ticket is None:
        continue
      tokens.append((ticket, event))
      if event.finish_reason is not None:
        del tickets[event.request_id], self._ids[ticket]
        self._running.discard(ticket)
    refused, self._refused = tuple(self._refused), []
    return Report(
      events=events,
      tokens=tuple(tokens),
      admitted=tuple(admitted),
      refused=refused,
      running=len(self._running),
      waiting=len(self._waiting) + len(self._ids) - len(self._running),
      free_pages=self._engine.num_free_pages,
    )
