"""The clients, in a process of their own: streams, idle connections, and one long prompt."""

import asyncio
import json
import resource
import sys

from experiments import http_client

_LONG_AFTER = 20  # events of the first stream


async def _stream(target, body, on_events=None):
  async with http_client.connected(target) as connection:
    status = await connection.ask("POST", "/v1/completions", json.dumps(body).encode())
    assert status == 200, await connection.body()
    count = 0
    async for events in connection.events():
      count += len(events)
      if on_events is not None:
        on_events(count)


async def _run(url, load):
  target = http_client.Target.of(url)
  idle = []
  for _ in range(load["idle"]):
    connection = await http_client.Connection.open(target)
    await connection.ask("GET", "/ping")
    await connection.body()
    idle.append(connection)
  now = asyncio.Event()
  tell = lambda count: count >= _LONG_AFTER and now.set()
  bodies = [
    {"prompt": [1 + i % 200], "max_tokens": load["tokens"], "stream": True, "ignore_eos": True,
     "temperature": 0}
    for i in range(load["streams"])
  ]  # fmt: skip
  work = [
    asyncio.create_task(_stream(target, body, tell if i == 0 else None))
    for i, body in enumerate(bodies)
  ]
  if load["long"]:
    await now.wait()
    prompt = [1 + i * 7 % 200 for i in range(load["long"])]
    await _stream(target, {"prompt": prompt, "max_tokens": 1, "stream": True, "temperature": 0})
  await asyncio.gather(*work)
  for connection in idle:
    connection.close()


def main():
  """Address and load come as arguments; exit code 0 when everything has been answered."""
  _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
  asyncio.run(_run(sys.argv[1], json.loads(sys.argv[2])))
