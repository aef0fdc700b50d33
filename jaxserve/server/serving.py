"""Listens, serves, and stops in order: the first SIGTERM drains, the second stops at once."""

import asyncio
import dataclasses
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from absl import logging

from jaxserve.server.app import make_app
from jaxserve.server.connections import Connection
from jaxserve.server.service import Served, Service

_KEEP_ALIVE_S = 75  # longer than the 60 s for which proxies keep unused connections
_BACKLOG = 2048
_CLOSE_S = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
  """Where and how to listen.

  Attributes:
    host: address to bind.
    port: 0 = any that is free.
    api_key: what clients must send as a bearer token; None = nothing.
    max_queue: sequences that may wait besides those that have a seat; more get a 429.
    max_body_bytes: of a request.
    vllm_names: /metrics has vLLM's names too.
    timeout_s: most that a request may take, waiting included; None = any time.
    drain_s: how long running requests have after the first SIGTERM.
  """

  host: str = "127.0.0.1"
  port: int = 8000
  api_key: str | None = None
  max_queue: int = 256
  max_body_bytes: int = 16 << 20
  vllm_names: bool = False
  timeout_s: float | None = None
  drain_s: float = 30.0


class _Server(uvicorn.Server):
  """uvicorn, but for what a signal does."""

  def __init__(self, config: uvicorn.Config, service: Service, drain_s: float):
    super().__init__(config)
    self._service, self._drain_s = service, drain_s
    self._loop: asyncio.AbstractEventLoop | None = None
    self._drain: asyncio.Task[None] | None = None

  async def serve(self, sockets: list[socket.socket] | None = None) -> None:
    """Serves until told to stop."""
    self._loop = asyncio.get_running_loop()
    await super().serve(sockets)

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM and SIGINT."""
    del frame
    assert self._loop is not None
    self._loop.call_soon_threadsafe(self.stop, signal.Signals(sig).name)

  def stop(self, why: str) -> None:
    """Drains; told a second time, stops at once. Call it on the event loop."""
    if self._drain is None:
      logging.info("%s: finishing %d sequences, then stopping", why, self._service.num_live)
      self._drain = asyncio.ensure_future(self._drained())
      return
    logging.info("%s again: stopping at once", why)
    self._service.abandon()
    self.should_exit = True

  async def _drained(self) -> None:
    await self._service.drain(self._drain_s)
    self.should_exit = True


def listen(options: ServerOptions) -> socket.socket:
  """A bound socket, before anything slow is done.

  Raises:
    ValueError: the address cannot be bound.
  """
  family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
  sock = socket.socket(family, socket.SOCK_STREAM)
  sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    sock.bind((options.host, options.port))
  except OSError as error:
    sock.close()
    where = f"host={options.host} port={options.port}"
    raise ValueError(f"{where}: cannot be bound: {error.strerror or error}") from None
  return sock


def serve(
  served: Served,
  options: ServerOptions,
  sock: socket.socket,
  on_ready: Callable[[Callable[[str], None]], None] | None = None,
) -> None:
  """Serves until a signal or `stop`, on uvloop where it is installed.

  Args:
    served: the model.
    options: how.
    sock: from `listen`; closed at the end.
    on_ready: called on the event loop once requests are taken, with what stops the server when
      called there.
  """
  service = Service(served, options.max_queue, options.timeout_s)
  app = make_app(
    service,
    api_key=options.api_key,
    max_body_bytes=options.max_body_bytes,
    vllm_names=options.vllm_names,
  )
  config = uvicorn.Config(
    app, log_level="warning", access_log=False, lifespan="off", server_header=False,
    timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_CLOSE_S, backlog=_BACKLOG,
    http=Connection, ws="none",
  )  # fmt: skip
  server = _Server(config, service, options.drain_s)

  async def run() -> None:
    service.start()
    sock.listen(_BACKLOG)
    host, port = sock.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    logging.info("Serving %s on http://%s:%d", served.name, where, port)
    if on_ready is not None:
      on_ready(server.stop)
    try:
      await server.serve([sock])
    finally:
      await service.stop()

  with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
    runner.run(run())
