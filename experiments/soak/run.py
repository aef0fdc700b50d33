"""Clients of every kind against a server in this process, and what must hold when they are done."""

import asyncio
import collections
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import random
import socket
import threading
import time

from experiments import http_client
from jaxserve import server
from jaxserve.progress import progress

MAX_BODY_BYTES = 1 << 20
_BUSY = (429, 503)
_MB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """seconds: of load. clients: at once. seed: of all choices."""

  seconds: float = 600.0
  clients: int = 24
  seed: int = 0
  max_queue: int = 12


@dataclasses.dataclass
class Counts:
  """What clients did, by kind, and what went wrong."""

  done: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  wrong: list[str] = dataclasses.field(default_factory=list)
  answered: int = 0
  refused: int = 0


class Client:
  """One client: does something, whole or in part, then something else."""

  def __init__(self, target, vocab_size, max_len, counts, seed):
    self.target, self.counts, self.rng = target, counts, random.Random(seed)
    self.vocab_size, self.max_len = vocab_size, max_len

  async def work(self, until):
    kinds = (
      (self.complete, 8), (self.stream, 8), (self.leave, 8), (self.slow, 2), (self.malformed, 3),
      (self.oversize, 1), (self.other, 2), (self.cut, 2),
    )  # fmt: skip
    calls, weights = zip(*kinds, strict=True)
    while time.monotonic() < until:
      (call,) = self.rng.choices(calls, weights)
      try:
        async with asyncio.timeout(120):
          await call()
      except Exception as error:
        self.counts.wrong.append(f"{call.__name__}: {type(error).__name__}: {error}")
      self.counts.done[call.__name__] += 1

  def body(self, **fields):
    rng = self.rng
    length = rng.choice((1, 5, 20, 60, self.max_len // 2))
    body = {
      "prompt": [rng.randrange(min(self.vocab_size, 256)) for _ in range(length)],
      "max_tokens": rng.choice((1, 2, 8, 30)), "temperature": rng.choice((0, 0.7)),
      "n": rng.choice((1, 1, 1, 2, 3)), "ignore_eos": rng.random() < 0.5, "seed": rng.randrange(99),
    }  # fmt: skip
    for name, value in (
      ("logprobs", 3), ("frequency_penalty", 0.5), ("stop", ["e", "\n"]), ("top_k", 4),
      ("logit_bias", {"5": 2}), ("min_tokens", 3), ("return_token_ids", True),
    ):  # fmt: skip
      if rng.random() < 0.15:
        body[name] = value
    if rng.random() < 0.15:
      body |= {"echo": True, "logprobs": 1, "max_tokens": rng.choice((0, 1))}
    return body | fields

  async def send(self, connection, body, path="/v1/completions"):
    """The status; a full queue is waited for, once."""
    data = json.dumps(body).encode()
    status = await connection.ask("POST", path, data)
    if status in _BUSY:
      await connection.body()
      self.counts.refused += 1
    return status

  async def complete(self):
    async with http_client.connected(self.target) as connection:
      for _ in range(self.rng.randrange(1, 4)):  # on one connection
        body = self.body()
        if await self.send(connection, body) in _BUSY:
          continue
        reply = json.loads(await connection.body())
        self.check(connection.status == 200, f"status {connection.status}: {reply}")
        ends = [choice["finish_reason"] for choice in reply["choices"]]
        self.check(len(ends) == body["n"] and set(ends) <= {"stop", "length"}, str(ends))
        self.check(reply["usage"]["completion_tokens"] <= body["n"] * body["max_tokens"], "tokens")
        self.counts.answered += 1

  async def stream(self, pause_s=0.0):
    body = self.body(stream=True, stream_options={"include_usage": True})
    if self.rng.random() < 0.3:
      body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 8}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with http_client.connected(self.target) as connection:
      if pause_s:
        sock = connection.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
      if await self.send(connection, body, path) in _BUSY:
        return
      self.check(connection.status == 200, f"status {connection.status}")
      ends, last = collections.Counter(), b""
      async for events in connection.events():
        for event in events:
          self.check(last != b"[DONE]", "something after [DONE]")
          last = event
          chunk = {} if event == b"[DONE]" else json.loads(event)
          self.check("error" not in chunk, str(chunk))
          ends.update(c["index"] for c in chunk.get("choices", ()) if c["finish_reason"])
        await asyncio.sleep(pause_s)
      wanted = {index: 1 for index in range(body.get("n", 1))}
      self.check(last == b"[DONE]" and ends == wanted, f"{last!r}, ends {dict(ends)}")
      self.counts.answered += 1

  async def slow(self):
    await self.stream(pause_s=self.rng.choice((0.01, 0.1)))

  async def leave(self):
    """Goes away: at once, while it waits, in its prompt, after some events."""
    async with http_client.connected(self.target) as connection:
      body = self.body(stream=self.rng.random() < 0.7, ignore_eos=True, max_tokens=60)
      data = json.dumps(body).encode()
      connection.writer.write(connection.head("POST", "/v1/completions", len(data), {}) + data)
      await connection.writer.drain()
      if self.rng.random() < 0.5:
        await asyncio.sleep(self.rng.choice((0, 0.005, 0.05, 0.2)))
        return
      if await connection.answer() == 200 and body["stream"]:
        left = self.rng.randrange(1, 6)
        async for _ in connection.events():
          left -= 1
          if not left:
            return

  async def cut(self):
    """Goes away in the middle of its request, or sends what is no HTTP."""
    async with http_client.connected(self.target) as connection:
      data = json.dumps(self.body()).encode()
      head = connection.head("POST", "/v1/completions", len(data), {})
      whole = self.rng.choice((head + data, b"\x16\x03\x01 hello\r\n\r\n", head[:-2]))
      connection.writer.write(whole[: self.rng.randrange(1, len(whole))])
      await connection.writer.drain()
      await asyncio.sleep(self.rng.choice((0, 0.02)))

  async def malformed(self):
    body = json.dumps(self.body()).encode()
    bad = self.rng.choice((
      body[: len(body) // 2], b"[1]", b"\xff" * 9, b'{"prompt":' + b"[" * 5000, b"{}", b"",
      json.dumps(self.body(temperature=9)).encode(), json.dumps(self.body(n=0)).encode(),
      json.dumps(self.body(prompt=[-1])).encode(), json.dumps(self.body(stop=[""])).encode(),
      json.dumps(self.body(guided_regex="[")).encode(),
    ))  # fmt: skip
    await self.refused(bad, 400)

  async def oversize(self):
    if self.rng.random() < 0.5:
      await self.refused(json.dumps({"prompt": [1] * (self.max_len + 1)}).encode(), 400)
    else:
      await self.refused(b" " * (MAX_BODY_BYTES + 1), 413)

  async def refused(self, data, status):
    async with http_client.connected(self.target) as connection:
      got = await connection.ask("POST", "/v1/completions", data)
      body = await connection.body()
      self.check(got == status and b'"error"' in body, f"{got} for {data[:40]!r}: {body[:200]!r}")
      self.counts.answered += 1

  async def other(self):
    async with http_client.connected(self.target) as connection:
      for path in self.rng.sample(("/health", "/v1/models", "/metrics", "/", "/openapi.json"), 2):
        self.check(await connection.ask("GET", path) == 200, path)
        self.check(len(await connection.body()) > 0, path)
      if self.rng.random() < 0.3:
        self.check(await connection.ask("GET", "/live/steps") == 200, "live")
        async for _ in connection.events():
          return

  def check(self, ok, what):
    if not ok:
      raise ValueError(what)


def execute(config, served):
  """Serves a model, lets clients loose on it, and says what is left.

  Args:
    config: of the clients.
    served: a `server.Served` whose engine is idle and warm.
  """
  counts, usage = Counts(), []
  with _serving(config, served) as (target, metrics):
    engine = served.engine
    sizes = engine.config.model.vocab_size, engine.config.scheduler.max_model_len

    async def everybody(seconds, seed):
      until = time.monotonic() + seconds
      clients = [Client(target, *sizes, counts, f"{seed} {i}") for i in range(config.clients)]
      work = [asyncio.create_task(client.work(until)) for client in clients]
      with progress(round(seconds), "s", "Soaking") as bar:
        while not all(task.done() for task in work):
          await asyncio.sleep(1)
          bar.advance(1)
          usage.append(_usage())
      await asyncio.gather(*work)
      while await _busy(target):
        await asyncio.sleep(0.1)

    asyncio.run(everybody(max(config.seconds / 4, 2), f"{config.seed} warm-up"))
    before, threads = _settled(), set(threading.enumerate())
    asyncio.run(everybody(config.seconds * 3 / 4, config.seed))
    after, new = _settled(), sorted(t.name for t in set(threading.enumerate()) - threads)
    text = metrics()
  return _findings(config, served, counts, before, after, new, text)


def _findings(config, served, counts, before, after, new_threads, text):
  engine = served.engine
  pool = engine.config.scheduler.cache.num_pages
  found = {
    "seconds": config.seconds, "clients": config.clients, "done": dict(counts.done),
    "answered": counts.answered, "refused": counts.refused, "ended": text,
    "wrong": counts.wrong[:10], "num_wrong": len(counts.wrong),
    "free_pages": engine.num_free_pages, "pages": pool, "retraces": engine.retraces,
    **{f"{key}_before": value for key, value in before.items()},
    **{f"{key}_after": value for key, value in after.items()},
  }  # fmt: skip
  bad = [f"{len(counts.wrong)} clients were not answered as they should"] if counts.wrong else []
  bad += [f"{pool - engine.num_free_pages} pages are not free"] * (engine.num_free_pages != pool)
  bad += [f"{engine.retraces} traces or compiles"] * bool(engine.retraces)
  for key, room in (("threads", 0), ("files", 2), ("rss_mb", 48)):
    grown = after[key] - before[key]
    told = f" ({', '.join(new_threads)})" if key == "threads" else ""
    bad += [f"{key} grew by {grown}{told}"] * (grown > room)
  return found | {"failures": bad}


@contextlib.contextmanager
def _serving(config, served):
  """A server on a thread of its own: (where, a function that says how requests ended)."""
  options = server.ServerOptions(
    port=0, max_queue=config.max_queue, max_body_bytes=MAX_BODY_BYTES, drain_s=10
  )
  sock, ready, started = server.listen(options), threading.Event(), []

  def on_ready(stop):
    started.extend((asyncio.get_running_loop(), stop))
    ready.set()

  port = sock.getsockname()[1]
  thread = threading.Thread(target=server.serve, args=(served, options, sock, on_ready))
  thread.start()
  ready.wait()
  target = http_client.Target("127.0.0.1", port)
  try:
    yield target, lambda: asyncio.run(_ended(target))
  finally:
    loop, stop = started
    loop.call_soon_threadsafe(stop, "the end")
    thread.join()


async def _text(target):
  async with http_client.connected(target) as connection:
    await connection.ask("GET", "/metrics")
    return (await connection.body()).decode()


async def _busy(target):
  names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
  text = await _text(target)
  lines = [l for l in text.splitlines() if l.startswith(tuple(f"jaxserve:{n}{{" for n in names))]
  return any(float(line.rpartition(" ")[2]) for line in lines)


async def _ended(target):
  lines = [l for l in (await _text(target)).splitlines() if "request_success_total{" in l]
  name = lambda line: line.split('finished_reason="')[1].split('"')[0]
  return {name(line): int(float(line.rpartition(" ")[2])) for line in lines}


def _usage():
  status = pathlib.Path("/proc/self/status").read_text()
  rss = next(int(l.split()[1]) for l in status.splitlines() if l.startswith("VmRSS"))
  return {
    "threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")),
    "rss_mb": round(rss / 1024),
  }  # fmt: skip


def _settled():
  """Usage once closed connections have gone."""
  gc.collect()
  time.sleep(1.0)
  return _usage()
