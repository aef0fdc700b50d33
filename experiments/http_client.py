"""A small HTTP/1.1 client on asyncio streams, for tools that load or vex a server.

A client library would be a dependency, and would hide what these tools are about: when bytes come,
and connections that end in the middle.
"""

import asyncio
import contextlib
import dataclasses
import json
import ssl
import urllib.parse
from collections.abc import AsyncIterator

_LIMIT = 1 << 20


@dataclasses.dataclass(frozen=True)
class Target:
  """Where a server is. `root` is what paths are appended to."""

  host: str
  port: int
  root: str = ""
  secure: bool = False

  @classmethod
  def of(cls, url: str) -> "Target":
    """ValueError if it is no http or https address."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
      raise ValueError(f"url={url!r}: must be like http://127.0.0.1:8000")
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    return cls(parts.hostname, port, parts.path.rstrip("/"), secure)


class Connection:
  """One connection; requests go over it one after another."""

  def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target):
    self.reader, self.writer, self._target = reader, writer, target
    self.status, self.headers = 0, dict[str, str]()

  @classmethod
  async def open(cls, target: Target) -> "Connection":
    """Connects."""
    context = ssl.create_default_context() if target.secure else None
    opened = await asyncio.open_connection(target.host, target.port, ssl=context, limit=_LIMIT)
    return cls(*opened, target)

  def close(self) -> None:
    """At once, without a word."""
    self.writer.transport.abort()

  def head(self, method: str, path: str, length: int, headers: dict[str, str]) -> bytes:
    """The first lines of a request."""
    lines = [f"{method} {self._target.root}{path} HTTP/1.1", f"host: {self._target.host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if method != "GET":
      lines += ["content-type: application/json", f"content-length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()

  async def ask(
    self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
  ) -> int:
    """Sends a request and reads the head of the answer; its status."""
    self.writer.write(self.head(method, path, len(body), headers or {}) + body)
    await self.writer.drain()
    return await self.answer()

  async def answer(self) -> int:
    """Reads the head of an answer."""
    first = await self.reader.readuntil(b"\r\n")
    self.status, self.headers = int(first.split()[1]), {}
    while (line := await self.reader.readuntil(b"\r\n")) != b"\r\n":
      name, _, value = line.decode("latin-1").partition(":")
      self.headers[name.lower()] = value.strip()
    return self.status

  async def parts(self) -> AsyncIterator[bytes]:
    """The body as it comes."""
    if "chunked" in self.headers.get("transfer-encoding", ""):
      while size := int(await self.reader.readuntil(b"\r\n"), 16):
        yield (await self.reader.readexactly(size + 2))[:-2]
      await self.reader.readexactly(2)
      return
    left = int(self.headers.get("content-length", 0))
    if left:
      yield await self.reader.readexactly(left)

  async def body(self) -> bytes:
    """The whole body."""
    return b"".join([part async for part in self.parts()])

  async def events(self) -> AsyncIterator[list[bytes]]:
    """Data of server-sent events, those that came together in one list."""
    rest = b""
    async for part in self.parts():
      *whole, rest = (rest + part).split(b"\n\n")
      if data := [event[6:] for event in whole if event.startswith(b"data: ")]:
        yield data


@contextlib.asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Connection]:
  """A connection for a while."""
  connection = await Connection.open(target)
  try:
    yield connection
  finally:
    connection.close()


async def get_json(target: Target, path: str) -> dict:
  """A small answer to a GET; ConnectionError with its status if it is not 200."""
  async with connected(target) as connection:
    status = await connection.ask("GET", path)
    body = await connection.body()
  if status != 200:
    raise ConnectionError(f"{path}: status {status}: {body[:200].decode(errors='replace')}")
  return json.loads(body)
