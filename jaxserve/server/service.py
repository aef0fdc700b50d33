"""What is being served: the model, its live requests, and the state that /health tells.

Everything here runs on the event loop but for the reports of the engine thread, which come in by
one wake-up per step.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Sequence

from absl import logging

from jaxserve.engine import Engine, SamplingParams, clock
from jaxserve.engine.request import Constraint, TokenEvent
from jaxserve.server.engine_thread import EngineThread, Report, Submission
from jaxserve.server.errors import ApiError, of_refusal, of_value_error
from jaxserve.server.generation import Choice, Generation, TextOptions
from jaxserve.server.grammar import Grammars
from jaxserve.server.metrics import Metrics
from jaxserve.server.protocol import Health
from jaxserve.server.steps import StepFeed, params_with
from jaxserve.text.tokenizer import Tokenizer

_TEXT_THREADS = 2
_JOIN_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
  """A model with all that serving it takes.

  Attributes:
    engine: idle, and nobody else's.
    tokenizer: the model's.
    chat_template: the model's, if it has one.
    name: what clients call it.
  """

  engine: Engine
  tokenizer: Tokenizer
  chat_template: str | None
  name: str

  @functools.cached_property
  def grammars(self) -> Grammars:
    """Makes what structured output is held to."""
    return Grammars(self.tokenizer, self.engine.config.model.vocab_size)

  @property
  def max_model_len(self) -> int:
    """Most tokens of a request."""
    return self.engine.config.scheduler.max_model_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One sequence to generate."""

  prompt: tuple[int, ...]
  sampling: SamplingParams
  priority: int = 0
  constraint: Constraint | None = None


class Service:
  """Opens and closes generations; one for each running server."""

  def __init__(self, served: Served, max_queue: int, timeout_s: float | None = None):
    """Nothing runs before `start`.

    Args:
      served: the model.
      max_queue: sequences that may wait besides those that have a seat.
      timeout_s: most that a request may take; None = any time.
    """
    self.served = served
    self._timeout_s = timeout_s
    self.created = int(clock.wall())
    self.metrics = Metrics(served.name, served.engine)
    self.feed = StepFeed(served.engine.config.scheduler.cache.num_pages)
    self.draining = False
    self._dead: str | None = None
    self.room = served.engine.config.scheduler.max_num_seqs + max_queue
    self._tickets = itertools.count()
    self._live: dict[int, tuple[Generation, Choice]] = {}
    self._open: set[Generation] = set()
    self._thread: EngineThread | None = None
    self._loop: asyncio.AbstractEventLoop | None = None
    # Tokenizing and rendering take time, which the event loop does not have.
    self.text_pool = _pool(_TEXT_THREADS, "text")

  @property
  def health(self) -> Health:
    """Whether requests are taken."""
    if self._dead is not None:
      return Health("dead", self._dead)
    return Health("draining", "the server is shutting down") if self.draining else Health("ok")

  @property
  def num_live(self) -> int:
    """Sequences that have not ended."""
    return len(self._live)

  def start(self) -> None:
    """Starts the engine thread; call it on the event loop."""
    self._loop = asyncio.get_running_loop()
    self._thread = EngineThread(self.served.engine, self._from_thread, self._thread_died)
    self._thread.start()

  async def stop(self) -> None:
    """Ends what is left with an error, then the threads."""
    self.feed.close()
    self._fail_all(ApiError(503, "the server is shutting down", "shutting_down"))
    if self._thread is not None:
      self._thread.stop()
      if not await asyncio.to_thread(self._thread.join, _JOIN_S):
        logging.error("A step did not end within %.0f s; leaving it", _JOIN_S)
    self.text_pool.shutdown(wait=False, cancel_futures=True)

  async def drain(self, timeout_s: float) -> None:
    """Takes no more requests; returns when all have been answered, at the latest after a while."""
    self.draining = True
    self.feed.close()
    deadline = clock.now() + timeout_s
    while self._open and clock.now() < deadline:
      await asyncio.sleep(0.02)
    if self._open:
      logging.warning("%d requests did not end within %g s", len(self._open), timeout_s)
      self._fail_all(ApiError(503, "the server is shutting down", "shutting_down"))

  def abandon(self) -> None:
    """Ends every request with an error, now."""
    self.draining = True
    self._fail_all(ApiError(503, "the server was told to stop at once", "shutting_down"))

  async def set_budget(self, budget: int) -> None:
    """Changes the token budget; returns when the next step will have it.

    Raises:
      ApiError: it is out of bounds, or nothing is served.
    """
    self.check_serving()
    params = params_with(self.served.engine, budget)
    assert self._thread is not None, "not started"
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    self._thread.set_params(params, lambda: loop.call_soon_threadsafe(done.set))
    with contextlib.suppress(TimeoutError):  # the engine may have died meanwhile
      await asyncio.wait_for(done.wait(), _JOIN_S)

  def open(self, jobs: Sequence[Job], options: TextOptions) -> Generation:
    """Starts generating; the caller must close what it is given.

    Raises:
      ApiError: a job can never be served (400), there is no room now (429), or no more requests
        are taken (503).
    """
    self.check_serving()
    for job in jobs:
      self._check(job)
    if len(jobs) > self.room:
      raise ApiError(
        400, f"n: {len(jobs)} sequences are more than the {self.room} there is room for",
        "conflicting_fields", "n",
      )  # fmt: skip
    if len(self._live) + len(jobs) > self.room:
      self.metrics.rejected.inc()
      raise ApiError(429, f"the queue of {self.room} sequences is full", "queue_full")
    assert self._thread is not None, "not started"
    choices = []
    for index, job in enumerate(jobs):
      submission = Submission(
        ticket=next(self._tickets),
        prompt=job.prompt,
        sampling=job.sampling,
        priority=job.priority,
        constraint=job.constraint,
      )
      choices.append(Choice(index, submission, options, self.served.tokenizer))
    generation = Generation(choices, clock.now(), self._close)
    if self._timeout_s is not None:
      message = f"the request took longer than the {self._timeout_s:g} s that this server allows"
      generation.fail_after(self._timeout_s, ApiError(504, message, "request_timeout"))
    self._open.add(generation)
    for choice in choices:
      self._live[choice.job.ticket] = generation, choice
      self._thread.submit(choice.job)
    return generation

  def check_serving(self) -> None:
    """Raises the ApiError for a server that takes no requests."""
    if self._dead is not None:
      raise ApiError(503, f"the engine has failed: {self._dead}", "engine_dead")
    if self.draining:
      raise ApiError(503, "the server is shutting down", "shutting_down")

  def _check(self, job: Job) -> None:
    most, length = self.served.max_model_len, len(job.prompt)
    if length >= most:
      raise ApiError(
        400, f"the prompt has {length} tokens, the model takes at most {most}, of which at least "
        "one is for the answer", "context_length_exceeded", "prompt",
      )  # fmt: skip
    try:
      self.served.engine.check(job.prompt, job.sampling, job.priority)
    except ValueError as error:
      raise of_refusal(error) from None

  def _close(self, generation: Generation) -> None:
    self._open.discard(generation)
    for choice in generation.choices:
      if self._live.pop(choice.job.ticket, None) is None:
        continue
      if self._thread is not None:
        self._thread.abort(choice.job.ticket)
      self.metrics.finished(generation.arrival_s, choice, "abort")

  def _fail_all(self, error: ApiError) -> None:
    for generation in tuple(self._open):
      generation.fail(error)

  def _from_thread(self, report: Report) -> None:
    assert self._loop is not None
    self._loop.call_soon_threadsafe(self._on_report, report)

  def _thread_died(self, error: Exception) -> None:
    assert self._loop is not None
    self._loop.call_soon_threadsafe(self._on_death, error)

  def _on_death(self, error: Exception) -> None:
    self._dead = f"{type(error).__name__}: {error}"
    self._fail_all(ApiError(500, f"the engine has failed: {self._dead}", "engine_error"))

  def _on_report(self, report: Report) -> None:
    self.metrics.on_report(report)
    done_s = report.events.done_s if report.events else clock.now()
    for ticket in report.admitted:
      if ticket in self._live and self._live[ticket][1].admitted_s is None:
        self._live[ticket][1].admitted_s = report.events.dispatched_s if report.events else done_s
    for ticket, error in report.refused:
      if ticket in self._live:
        generation, _ = self._live[ticket]
        generation.fail(of_value_error(ValueError(str(error))))
    gaps_s = [self._take(ticket, event, done_s) for ticket, event in report.tokens]
    self.feed.add(report, max(gaps_s, default=0.0))

  def _take(self, ticket: int, event: TokenEvent, done_s: float) -> float:
    """Hands a token to whom it belongs; how long they had waited since the one before."""
    if ticket not in self._live:
      return 0.0  # it ended while this token was on its way
    generation, choice = self._live[ticket]
    if event.finish_reason == "error":
      self.metrics.numeric_errors.inc()
      generation.fail(ApiError(500, "the model's output is not a number", "numeric_error"))
    if (error := getattr(choice.job.constraint, "error", None)) is not None:
      message = f"the structure asked for could not be kept up: {error}"
      generation.fail(ApiError(400, message, "structure_failed"))
    piece = choice.take(event)
    self.metrics.token(generation.arrival_s, choice, done_s)
    gap_s = done_s - choice.token_times_s[-1] if choice.token_times_s else 0.0
    choice.token_times_s.append(done_s)
    if piece.finish_reason is not None:
      del self._live[ticket]
      if event.finish_reason is None and self._thread is not None:
        self._thread.abort(ticket)  # a stop string, of which the engine knows nothing
      self.metrics.finished(generation.arrival_s, choice, piece.finish_reason)
    generation.give(piece)
    return gap_s


def _pool(num_threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
  """A pool whose threads all run from the start: a server's threads never grow in number."""
  pool = concurrent.futures.ThreadPoolExecutor(num_threads, name)
  everyone = threading.Barrier(num_threads)
  for _ in range(num_threads):
    pool.submit(everyone.wait)
  return pool
