"""Answers while the model is loaded: 503, so that a probe learns that the server is on its way."""

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from jaxserve.server.protocol import Health, encode

_POLL_S = 0.05
_READ_S = 1.0
_BACKLOG = 128


def _stop(sig: int, frame: FrameType | None) -> None:
  del sig, frame
  sys.exit(0)


@contextlib.contextmanager
def answering(sock: socket.socket, reason: str = "the model is being loaded") -> Iterator[None]:
  """Answers on a bound socket until it is left, which stays listening; a SIGTERM ends the process.

  Args:
    sock: from `serving.listen`.
    reason: what /health says, as does every other path.
  """
  body = encode(Health("loading", reason))
  head = (
    "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\n"
    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
  )
  done = threading.Event()
  sock.listen(_BACKLOG)
  sock.settimeout(_POLL_S)
  answer = head.encode() + body
  thread = threading.Thread(target=_answer, args=(sock, answer, done), name="loading", daemon=True)
  before = None
  if threading.current_thread() is threading.main_thread():
    before = signal.signal(signal.SIGTERM, _stop)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()
    if before is not None:
      signal.signal(signal.SIGTERM, before)


def _answer(sock: socket.socket, answer: bytes, done: threading.Event) -> None:
  while not done.is_set():
    try:
      client, _ = sock.accept()
    except OSError:  # nobody came
      continue
    with client, contextlib.suppress(OSError):
      client.settimeout(_READ_S)
      client.recv(1 << 16)
      client.sendall(answer)
      client.shutdown(socket.SHUT_WR)
