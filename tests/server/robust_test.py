"""Heads, bodies and numbers before a request is understood, and a server without its model yet."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from jaxserve import server
from jaxserve.server import connections
from tests.testing import servers

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def run():
  with servers.running() as run:
    yield run
    servers.eventually(run.is_empty)


def connect(run):
  host, _, port = run.url.removeprefix("http://").partition(":")
  return socket.create_connection((host, int(port)), timeout=20)


def answer(sock):
  data = b""
  try:
    while part := sock.recv(65536):
      data += part
  except ConnectionResetError:
    pass
  return data


def test_whatever_is_asked_no_thread_is_started(run):
  """Neither for an answer nor for a refusal: threads would outlive them."""
  before = set(threading.enumerate())
  for request in (
    b"GET /health", b"GET /", b"GET /metrics", b"GET /docs", b"GET /nothing", b"PUT /health",
    b"POST /tokenize", b"POST /v1/completions", b"POST /v1/chat/completions",
  ):  # fmt: skip
    with connect(run) as sock:
      sock.sendall(request + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n{")
      assert sock.recv(12).startswith(b"HTTP/1.1 ")
  assert set(threading.enumerate()) <= before


class TestHeads:
  def test_a_long_head_is_a_431(self, run):
    with connect(run) as sock:
      sock.sendall(b"GET /health HTTP/1.1\r\n")
      for _ in range(connections.MAX_HEAD_BYTES // 1000 + 1):
        sock.sendall(b"x" * 1000)
        time.sleep(0.001)
      assert answer(sock).startswith(b"HTTP/1.1 431 ")

  def test_a_head_that_does_not_come_is_given_up(self, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    with servers.running() as run:
      silent, slow = connect(run), connect(run)
      slow.sendall(b"GET /health HT")
      begin = time.monotonic()
      assert answer(silent) == answer(slow) == b"" and time.monotonic() - begin < 10
      body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
      assert run.post(TEXT, body).status_code == 200  # a request may take longer than its head

  def test_large_bodies_in_pieces_and_several_on_one_connection(self, run):
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "u" * 200_000}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with connect(run) as sock:
      for _ in range(3):
        sock.sendall(head)
        for at in range(0, len(body), 30_000):
          sock.sendall(body[at : at + 30_000])
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 OK")


class TestBodies:
  def test_whole_numbers_may_have_a_point(self, run):
    body = {"prompt": [72.0, 105], "max_tokens": 2.0, "n": 1.0, "seed": 3.0, "top_k": -1.0}
    reply = run.post(TEXT, body)
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 2
    reply = run.post(TEXT, body | {"n": 1.5})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "n"

  @pytest.mark.parametrize("depth, status", [(100, 200), (200, 400), (900, 400)])
  def test_depth_of_what_is_passed_over(self, run, depth, status):
    inner = "[" * depth + "]" * depth
    text = '{"prompt":"a","max_tokens":1,"unknown":' + inner + ',"user":"[[{"}'
    assert run.client.post(TEXT, content=text).status_code == status

  def test_brackets_in_texts_are_no_depth(self, run):
    body = {"prompt": "a", "max_tokens": 1, "user": "[{" * 500 + '\\"'}
    assert run.post(TEXT, body).status_code == 200

  def test_a_length_that_lies(self, run):
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n{{}}"
    with connect(run) as sock:
      sock.sendall(head.encode())
    assert run.complete(max_tokens=1)

  def test_an_empty_chat_message_is_a_request(self, run):
    assert run.chat("", max_tokens=1)["usage"]["prompt_tokens"] > 0


class TestLoading:
  def test_every_path_is_a_503_until_the_model_is_there(self):
    sock = server.listen(server.ServerOptions(port=0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with server.answering(sock, "weights"):
      for path in ("/health", "/v1/models"):
        with pytest.raises(urllib.error.HTTPError) as caught:
          urllib.request.urlopen(url + path, timeout=10)
        assert caught.value.code == 503 and caught.value.headers["retry-after"] == "5"
        assert json.loads(caught.value.read()) == {"status": "loading", "reason": "weights"}
      silent = socket.create_connection(sock.getsockname())  # does not hold up the others
    silent.close()
    served, ready = servers.served(), threading.Event()
    stop = []

    def on_ready(stopper):
      stop.extend((asyncio.get_running_loop(), stopper))
      ready.set()

    options = server.ServerOptions()
    thread = threading.Thread(target=server.serve, args=(served, options, sock, on_ready))
    thread.start()
    assert ready.wait(30)
    with urllib.request.urlopen(url + "/health", timeout=10) as reply:
      assert reply.status == 200
    loop, stopper = stop
    loop.call_soon_threadsafe(stopper, "the test")
    thread.join(30)
    assert not thread.is_alive()

  def test_a_sigterm_while_loading_ends_the_process_in_order(self):
    program = (
      "import time\nfrom jaxserve import server\n"
      "sock = server.listen(server.ServerOptions(port=0))\n"
      "with server.answering(sock):\n  print('up', flush=True)\n  time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
