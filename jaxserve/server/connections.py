"""Connections: how long a request's head may be, and how long it may take."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
HEAD_S = 60.0
_TOO_LARGE = (
  b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class Connection(HttpToolsProtocol):
  """uvicorn's, but the head of a request is limited in bytes and in time.

  Its parser keeps what is no whole line yet, and would keep any amount of it; and a connection on
  which nothing ever came would stay for ever.
  """

  _head = 0
  _in_head = True
  _complete = 0  # requests
  _timer: asyncio.TimerHandle | None = None

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
    """A client is there."""
    super().connection_made(transport)
    self._expect_head()

  def connection_lost(self, exc: Exception | None) -> None:
    """It has gone."""
    self._got_head()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    """Some of a request."""
    if self._in_head and self._timer is None:
      self._expect_head()
    complete = self._complete
    super().data_received(data)
    if self._in_head and complete == self._complete:  # else the data ended a body
      self._head += len(data)
      if self._head > MAX_HEAD_BYTES and not self.transport.is_closing():
        self.transport.write(_TOO_LARGE)
        self.transport.close()

  def on_headers_complete(self) -> None:
    """The head was all right."""
    self._got_head()
    self._in_head = False
    super().on_headers_complete()

  def on_message_complete(self) -> None:
    """What follows is another request's head."""
    self._in_head, self._head = True, 0
    self._complete += 1
    super().on_message_complete()

  def _expect_head(self) -> None:
    self._timer = asyncio.get_running_loop().call_later(HEAD_S, self._give_up)

  def _got_head(self) -> None:
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None

  def _give_up(self) -> None:
    self._timer = None
    self.transport.close()
