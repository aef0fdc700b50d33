"""Requests from arrival to end, whichever end it is: together, refused, left, drained, failed."""

import concurrent.futures
import json
import socket
import threading
import time

import pytest

from jaxserve.engine import Engine
from tests.testing import servers
from tests.testing.servers import MAX_MODEL_LEN, NAME, eventually

TEXT = "/v1/completions"
LONG = {"prompt": "Hello", "max_tokens": 80, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def slow(monkeypatch):
  """Steps take at least this long."""
  step = Engine.step
  pause = threading.Event()

  def slow_step(engine):
    if not engine.is_idle:
      pause.wait(0.01)
    return step(engine)

  monkeypatch.setattr(Engine, "step", slow_step)


def raw(run, body, path=TEXT):
  """A request on a socket of its own, which the test may close at any moment."""
  host, _, port = run.url.removeprefix("http://").partition(":")
  sock = socket.create_connection((host, int(port)), timeout=20)
  data = json.dumps(body).encode()
  head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
  sock.sendall(head.encode() + data)
  return sock


def test_requests_together_give_what_they_give_alone():
  prompts = [bytes([65 + i % 26]) * (1 + 5 * i % 60) for i in range(14)]
  alone = [servers.alone(list(prompt), 12) for prompt in prompts]
  model = servers.served()
  with servers.running() as run, concurrent.futures.ThreadPoolExecutor(14) as pool:
    ask = lambda prompt: run.complete(list(prompt), max_tokens=12, skip_special_tokens=False)
    replies = list(pool.map(ask, prompts))
    for tokens, reply in zip(alone, replies, strict=True):
      text = model.tokenizer.decode(tokens, skip_special_tokens=False)
      assert reply["choices"][0]["text"] == text
    eventually(run.is_empty)
    assert run.metric("retraces") == 0
    assert run.metric("request_success_total", finished_reason="length") == 14
    assert run.metric("time_to_first_token_seconds_count") == 14
    assert run.metric("inter_token_latency_seconds_count") == 14 * 11
    assert run.metric("generation_tokens_total") == 14 * 12
    assert run.metric("prompt_tokens_total") == sum(map(len, prompts))
    computed = run.metric("step_scheduled_tokens_total", kind="prefill")
    found = run.metric("prefix_cache_hits_total")
    assert computed + found >= run.metric("prompt_tokens_total")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["at once", "in the middle"])
def test_who_leaves_frees_everything(slow, stream, when):
  with servers.running() as run:
    socks = [raw(run, LONG | {"stream": stream, "n": 2}) for _ in range(5)]
    if when == "in the middle":
      eventually(lambda: run.metric("generation_tokens_total") > 10)
    for sock in socks:
      sock.close()
    eventually(run.is_empty)
    assert run.metric("request_success_total", finished_reason="length") == 0
    if when == "in the middle":
      assert run.metric("request_success_total", finished_reason="abort") == 10
    run.complete(max_tokens=2)
  assert servers.served().engine.num_free_pages == servers.NUM_PAGES


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_who_leaves_while_preempted_frees_everything(monkeypatch, prefix_cache):
  """Of five that outgrow the pool the newest is preempted, and leaves before it is back."""
  model = servers.served(prefix_cache=prefix_cache)
  prompts = [f"{name} of those who outgrow it" for name in ("One", "Two", "Three", "Four", "Five")]
  alone = [servers.alone(list(prompt.encode()), 64) for prompt in prompts]
  all_in, preempted, go_on = (threading.Event() for _ in range(3))
  step = Engine.step

  def step_and_wait(engine):
    if not all_in.wait(0.005):
      return None
    events = step(engine)
    if events and events.preempted:
      preempted.set()
      go_on.wait(30)
    return events

  monkeypatch.setattr(Engine, "step", step_and_wait)
  with servers.running(model) as run, concurrent.futures.ThreadPoolExecutor(4) as pool:
    ask = lambda prompt: run.complete(prompt, max_tokens=64, skip_special_tokens=False)
    stay = []
    for count, prompt in enumerate(prompts[:4], 1):
      stay.append(pool.submit(ask, prompt))
      eventually(lambda count=count: run.metric("num_requests_waiting") == count)
    leaves = raw(run, LONG | {"prompt": prompts[4], "max_tokens": 64, "stream": True})
    eventually(lambda: run.metric("num_requests_waiting") == 5)
    all_in.set()
    assert preempted.wait(30)
    assert leaves.recv(100).startswith(b"HTTP/1.1 200")  # it had begun
    leaves.close()
    eventually(lambda: run.metric("request_success_total", finished_reason="abort") == 1)
    go_on.set()
    for tokens, reply in zip(alone, stay, strict=False):
      text = model.tokenizer.decode(tokens, skip_special_tokens=False)
      assert reply.result()["choices"][0]["text"] == text
    eventually(run.is_empty)
    assert run.metric("num_preemptions_total") >= 1 and run.metric("retraces") == 0
    assert run.metric("request_success_total", finished_reason="length") == 4
    queried = sum(map(len, prompts)) if prefix_cache else 0
    assert run.metric("prefix_cache_queries_total") == queried  # once each, preempted or not
  assert model.engine.num_free_pages == servers.NUM_PAGES


def test_a_full_queue_is_a_429(slow):
  with servers.running(max_queue=1) as run:  # 5 seats and a place
    socks = [raw(run, LONG | {"n": 3}) for _ in range(2)]
    eventually(lambda: run.metric("num_requests_running") == servers.NUM_SEATS)
    reply = run.post(TEXT, LONG)
    assert reply.status_code == 429 and reply.json()["error"]["code"] == "queue_full"
    assert reply.headers["retry-after"] == "1" and reply.headers["x-request-id"]
    assert run.metric("requests_rejected_total") == 1
    assert run.metric("http_responses_total", code="429") == 1
    assert run.post(TEXT, LONG | {"n": 7}).json()["error"]["param"] == "n"  # never any room
    for sock in socks:
      assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
      sock.close()
    eventually(run.is_empty)
    run.complete(max_tokens=2)


def test_a_drain_finishes_what_runs_and_takes_nothing_new(slow):
  with servers.running() as run:
    with run.client.stream("POST", TEXT, json=LONG | {"stream": True}) as reply:
      lines = reply.iter_lines()
      first = next(lines)
      run.stop()
      eventually(lambda: run.get("/health").status_code == 503)
      assert run.get("/health").json()["status"] == "draining"
      refused = run.post(TEXT, LONG)
      assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
      rest = [line for line in lines if line]
    assert first.startswith("data: ") and rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    run.thread.join(10)
    assert not run.thread.is_alive()


def test_told_twice_it_stops_at_once(slow):
  with servers.running() as run:
    with run.client.stream("POST", TEXT, json=LONG | {"stream": True}) as reply:
      lines = reply.iter_lines()
      next(lines)
      run.stop()
      run.stop()
      rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and "shutting_down" in rest[-2]
    run.thread.join(10)
    assert not run.thread.is_alive()
  assert servers.served().engine.num_free_pages == servers.NUM_PAGES


def test_a_drain_has_an_end(slow):
  with servers.running(drain_s=0.1) as run:
    sock = raw(run, LONG)
    eventually(lambda: run.metric("num_requests_running") == 1)
    run.stop()
    answer = b""
    while part := sock.recv(1000):  # until the server closes the connection
      answer += part
    assert answer.startswith(b"HTTP/1.1 503") and b"shutting_down" in answer
    sock.close()


def test_a_request_that_takes_too_long(slow):
  with servers.running(timeout_s=0.3) as run:
    run.complete(max_tokens=2)
    reply = run.post(TEXT, LONG)
    assert reply.status_code == 504 and reply.json()["error"]["code"] == "request_timeout"
    with run.client.stream("POST", TEXT, json=LONG | {"stream": True}) as reply:
      lines = [line for line in reply.iter_lines() if line]
    assert reply.status_code == 200 and lines[-1] == "data: [DONE]" and "0.3 s" in lines[-2]
    eventually(run.is_empty)
    assert run.metric("request_success_total", finished_reason="abort") == 2


def test_a_failing_engine_says_so(monkeypatch):
  engine = servers.served().engine
  step = engine.step
  with servers.running() as run:
    run.complete(max_tokens=2)
    broken = lambda: step() if engine.is_idle else (_ for _ in ()).throw(OSError("no more disk"))
    monkeypatch.setattr(engine, "step", broken)
    reply = run.post(TEXT, LONG)
    error = reply.json()["error"]
    assert reply.status_code == 500 and error["code"] == "engine_error"
    assert "OSError: no more disk" in error["message"] and error["type"] == "server_error"
    health = run.get("/health")
    assert health.status_code == 503 and "no more disk" in health.json()["reason"]
    reply = run.post(TEXT, LONG)
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_dead"
  monkeypatch.undo()
  for request_id in list(engine._slots):
    engine.abort(request_id)
  while engine.step():
    pass


def test_a_key_guards_the_api_and_not_the_probes():
  with servers.running(api_key="sécret") as run:
    assert run.get("/health").status_code == run.get("/metrics").status_code == 200
    for header in (
      {},
      {"authorization": "Bearer wrong"},
      {"authorization": b"Basic s\xc3\xa9cret"},
    ):
      reply = run.get("/v1/models", headers=header)
      assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
      assert run.client.post("/tokenize", content="{", headers=header).status_code == 401
    right = {"authorization": "Bearer sécret".encode()}
    assert run.get("/v1/models", headers=right).status_code == 200


VLLM_SERIES = (
  "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
  "prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_bucket",
  "inter_token_latency_seconds_sum", "e2e_request_latency_seconds_count",
  "request_queue_time_seconds_bucket", "request_success_total", "iteration_tokens_total_bucket",
  "prefix_cache_queries_total", "prefix_cache_hits_total", "cache_config_info",
  "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
  "request_inference_time_seconds_sum", "request_time_per_output_token_seconds_sum",
  "request_prompt_tokens_sum", "request_generation_tokens_sum", "request_params_max_tokens_sum",
)  # fmt: skip


OWN_SERIES = (
  "step_seconds_bucket", "step_budget_tokens", "step_scheduled_tokens_total", "plan_seconds_bucket",
  "device_seconds_bucket", "decode_stall_seconds_bucket", "compile_seconds_total",
  "compile_cache_hits_total", "retraces",
)  # fmt: skip


def test_prefill_that_holds_decodes_up_is_a_stall(slow):
  with servers.running() as run, concurrent.futures.ThreadPoolExecutor(2) as pool:
    stream = pool.submit(run.complete, max_tokens=60)
    eventually(lambda: run.metric("generation_tokens_total") > 3)
    assert run.metric("decode_stall_seconds_count") == 0
    run.complete("x" * 60, max_tokens=1)  # four chunks beside the stream
    stream.result()
    assert 4 <= run.metric("decode_stall_seconds_count") <= 6


def test_metrics_under_vllm_s_names():
  with servers.running(vllm_names=True) as run:
    run.complete(max_tokens=2)
    text = run.get("/metrics").text
    for name in VLLM_SERIES:
      assert f"\njaxserve:{name}{{" in text and f"\nvllm:{name}{{" in text, name
    assert "vllm:step_seconds" not in text and "vllm:compile" not in text
    for name in OWN_SERIES:
      assert f"\njaxserve:{name}{{" in text and f"vllm:{name}" not in text, name
    total = lambda name: run.metric(name)
    assert 0 < total("plan_seconds_sum") and 0 < total("device_seconds_sum")
    assert total("compile_executables_total") > 10 and total("compile_seconds_total") >= 0
    assert total("plan_seconds_count") == total("device_seconds_count") == 2  # steps
  with servers.running() as run:
    assert "vllm:" not in run.get("/metrics").text


def test_a_long_prompt_does_not_hold_a_probe_up(slow):
  with servers.running() as run, concurrent.futures.ThreadPoolExecutor(4) as pool:
    big = {"prompt": "x" * 2_000_000}
    asked = [pool.submit(run.post, TEXT, big) for _ in range(4)]
    times = []
    while not all(a.done() for a in asked):
      begin = time.monotonic()
      assert run.get("/health").status_code == 200
      times.append(time.monotonic() - begin)
    assert max(times) < 1.0
    assert all(a.result().status_code == 400 for a in asked)


def test_chunked_prefill_streams_nothing_before_its_end():
  with servers.running() as run:
    body = LONG | {"prompt": "x" * 80, "max_tokens": 4, "logprobs": 1}  # five chunks
    tokens = [c["choices"][0]["logprobs"]["tokens"] for c in run.stream(TEXT, body)]
    assert sum(map(len, tokens)) == 4
    assert run.complete("x" * 80)["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert NAME in run.get("/metrics").text
