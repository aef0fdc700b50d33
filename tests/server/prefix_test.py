"""What clients are told of the prefix cache."""

import pytest

from tests.testing import servers

PROMPT = "The same beginning, word for word."  # 34 bytes: 4 pages of 8 tokens


@pytest.fixture(scope="module")
def run():
  with servers.running(servers.served(prefix_cache=True)) as running:
    yield running
    servers.eventually(running.is_empty)


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
