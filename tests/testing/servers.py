"""A server on a free port with a tiny random model, run on a thread of the test's process."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import socket
import threading
import time

import httpx
import jax.numpy as jnp
import numpy as np

from jaxserve import server
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.engine import Engine, EngineConfig
from jaxserve.model import llama
from jaxserve.model.random_llama import random_checkpoint
from jaxserve.text.tokenizer import ByteTokenizer
from tests.testing import engines

NAME = "tiny"
MAX_MODEL_LEN = 96
NUM_SEATS = 5
NUM_PAGES = 56  # of 8 tokens: four of the longest requests fit, five do not
SCHEDULER = SchedulerConfig(
  cache=CacheConfig(num_pages=NUM_PAGES, page_size=8),
  max_num_seqs=NUM_SEATS, max_requests=7, max_budget=16, max_model_len=MAX_MODEL_LEN,
)  # fmt: skip


@functools.cache
def served(prefix_cache: bool = True) -> server.Served:
  """One engine for a process; whoever uses it leaves it idle, though not its prefix cache."""
  checkpoint = random_checkpoint()
  graphdef, leaves = llama.load(checkpoint.config, checkpoint.params, jnp.dtype("float32"))
  config = EngineConfig(
    model=checkpoint.config, scheduler=dataclasses.replace(SCHEDULER, prefix_cache=prefix_cache),
    dtype="float32", token_buckets=(16,), query_tile=16, eos_token_ids=checkpoint.eos_token_ids,
    score_prompts=True,
  )  # fmt: skip
  engine = Engine.build(config, graphdef, leaves, store=engines.shared_store())
  engine.warm_up()
  return server.Served(
    engine=engine, tokenizer=ByteTokenizer(), chat_template=checkpoint.chat_template, name=NAME
  )


# Of a model that calls tools: how many there are, and who said what, unless it was nobody.
TOOLS_TEMPLATE = (
  "{% if tools %}<tool_call>{{ tools|length }}{% endif %}"
  "{% for m in messages %}{% if m['role'] == 'nobody' %}"
  "{{ raise_exception('nobody says nothing') }}{% endif %}"
  "{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
)


def with_tools() -> server.Served:
  """The same engine with a chat template that has tools."""
  return dataclasses.replace(served(), chat_template=TOOLS_TEMPLATE)


def eventually(condition, seconds=10):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "it did not happen"
    time.sleep(0.01)


class Running:
  """What a test sees of a server."""

  def __init__(self, url, stop):
    self.url, self.stop = url, stop
    self.client = httpx.Client(base_url=url, timeout=60)

  def post(self, path, body, **options):
    return self.client.post(path, json=body, **options)

  def get(self, path, **options):
    return self.client.get(path, **options)

  def complete(self, prompt="Hello", **fields):
    """A greedy completion that goes to max_tokens, unless told otherwise."""
    body = {"model": NAME, "prompt": prompt, "temperature": 0, "ignore_eos": True} | fields
    reply = self.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()

  def chat(self, content="Hello", **fields):
    messages = [{"role": "user", "content": content}]
    body = {"model": NAME, "messages": messages, "temperature": 0, "ignore_eos": True} | fields
    reply = self.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()

  def stream(self, path, body):
    """The events of a stream; checks how it begins and ends."""
    with self.client.stream("POST", path, json=body | {"stream": True}) as reply:
      assert reply.status_code == 200, reply.read()
      assert reply.headers["content-type"].startswith("text/event-stream")
      events = "".join(reply.iter_text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

  def metric(self, name, **labels):
    """The sum of a series over the labels that are not given."""
    total, found = 0.0, False
    for line in self.get("/metrics").text.splitlines():
      series, _, value = line.rpartition(" ")
      if series.partition("{")[0] != f"jaxserve:{name}":
        continue
      if all(f'{key}="{want}"' in series for key, want in labels.items()):
        total, found = total + float(value), True
    assert found or labels, name
    return total

  def is_empty(self):
    """No request, and every page free."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(self.metric(name) == 0 for name in gauges)


@contextlib.contextmanager
def running(model=None, **options):
  """Runs a server; at the end nothing is left of it."""
  model = model or served()
  model.engine.guard.count = 0  # what other engines compiled meanwhile is not this one's
  settings = server.ServerOptions(port=0, **options)
  sock = server.listen(settings)
  ready: dict = {}
  is_ready = threading.Event()

  def on_ready(stop):
    ready.update(loop=asyncio.get_running_loop(), stop=stop)
    is_ready.set()

  thread = threading.Thread(
    target=lambda: server.serve(model, settings, sock, on_ready), daemon=True
  )
  port = sock.getsockname()[1]
  thread.start()
  assert is_ready.wait(60)
  stop = lambda: ready["loop"].call_soon_threadsafe(ready["stop"], "the test")
  run = Running(f"http://127.0.0.1:{port}", stop)
  run.thread = thread
  try:
    yield run
  finally:
    run.client.close()
    for _ in range(2):
      with contextlib.suppress(RuntimeError):  # the loop is closed: it had stopped by itself
        stop()
    thread.join(60)
    assert not thread.is_alive()


def is_free(port):
  with contextlib.closing(socket.socket()) as sock:
    return sock.connect_ex(("127.0.0.1", port)) != 0


def alone(prompt, max_tokens):
  """The greedy tokens of a prompt, by an engine that nobody else uses and that reuses nothing."""
  from jaxserve.engine import SamplingParams

  sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
  (done,) = served(prefix_cache=False).engine.generate([prompt], sampling)
  return np.array(done.tokens).tolist()
