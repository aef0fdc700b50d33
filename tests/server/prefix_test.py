"""What clients are told of the prefix cache."""

import json
import socket

import pytest

from tests.testing import servers

PROMPT = "The same beginning, word for word."  # 34 bytes: 4 pages of 8 tokens


@pytest.fixture(scope="module")
def run():
  model = servers.served()
  model.engine.reset_prefix_cache()
  with servers.running(model) as running:
    yield running
    servers.eventually(running.is_empty)
    assert running.metric("retraces") == 0


def cached(reply):
  return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_what_was_found_is_told_and_counted(run):
  first, again = (run.complete(PROMPT, max_tokens=4) for _ in range(2))
  longer = run.complete(PROMPT + " And more.", max_tokens=4)
  assert (cached(first), cached(again), cached(longer)) == (0, 32, 32)
  assert again["choices"][0]["text"] == first["choices"][0]["text"]
  body = {"prompt": PROMPT, "max_tokens": 2, "stream_options": {"include_usage": True}}
  chunks = run.stream("/v1/completions", body)
  assert cached(chunks[-1]) == 32
  assert run.metric("prefix_cache_hits_total") == 96
  assert run.metric("prefix_cache_queries_total") == 3 * len(PROMPT) + len(PROMPT + " And more.")
  assert run.metric("retraces") == 0


def test_scores_are_of_the_whole_prompt_though_it_is_cached(run):
  fields = dict(echo=True, logprobs=1, max_tokens=1)
  scored = run.complete(PROMPT, **fields)
  assert cached(scored) == 0
  logprobs = scored["choices"][0]["logprobs"]["token_logprobs"]
  assert logprobs[0] is None and len(logprobs) == len(PROMPT) + 1 and None not in logprobs[1:]


def test_another_salt_finds_nothing(run):
  assert cached(run.complete(PROMPT, max_tokens=1)) == 32
  salted = [cached(run.complete(PROMPT, max_tokens=1, cache_salt="mine")) for _ in range(2)]
  assert salted == [0, 32]


def test_choices_of_one_prompt_count_it_once(run):
  prompt = "Several choices of one text, of which one is computed."
  fields = {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 12}
  first, again = (run.complete(prompt, **fields) for _ in range(2))
  assert first["choices"] == again["choices"] and len({c["text"] for c in first["choices"]}) == 3
  assert cached(first) == 0 and cached(again) == len(prompt) // 8 * 8
  twice = run.complete([prompt, prompt + "!", "x"], n=2, max_tokens=1)
  assert cached(twice) == 2 * (len(prompt) // 8 * 8)  # each prompt once, however many choices


def test_scores_and_echoes_do_not_change_with_what_is_cached(run):
  fields = {"echo": True, "logprobs": 3, "max_tokens": 4}
  salted = lambda salt: run.complete(PROMPT, **fields, cache_salt=salt)["choices"]
  fresh = salted("nobody")
  assert salted("nobody") == fresh == salted(None)
  alone = run.complete(PROMPT, prompt_logprobs=2, max_tokens=4, cache_salt="else")["choices"]
  assert run.complete(PROMPT, prompt_logprobs=2, max_tokens=4)["choices"] == alone


def test_who_leaves_a_shared_prefix_takes_nothing_from_others(run):
  prompt = "Shared by who leaves and by who stays."
  stays = run.complete(prompt, max_tokens=40)["choices"]
  host, _, port = run.url.removeprefix("http://").partition(":")
  for _ in range(3):
    body = {"prompt": prompt, "max_tokens": 50, "n": 2, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=20) as sock:
      head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
      sock.sendall(head.encode() + data)
      assert sock.recv(100).startswith(b"HTTP/1.1 200")
    again = run.complete(prompt, max_tokens=40)
    assert again["choices"] == stays and cached(again) >= 32
  servers.eventually(run.is_empty)
  assert servers.served().engine.num_free_pages == servers.NUM_PAGES
