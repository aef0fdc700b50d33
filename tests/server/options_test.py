"""Options of a request over HTTP: scores of prompts, penalties, biases, ids, alternatives."""

import pytest

from tests.testing import servers

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "Héllo, how are you?"  # more than one chunk of the budget of 16


@pytest.fixture(scope="module")
def run():
  with servers.running() as run:
    yield run
    servers.eventually(run.is_empty)
    assert run.metric("retraces") == 0


class TestPromptScores:
  def test_echo_scores_prompt_and_outputs(self, run):
    (choice,) = run.complete(PROMPT, echo=True, logprobs=5, max_tokens=1)["choices"]
    scores = choice["logprobs"]
    size = len(PROMPT.encode()) + 1
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == size
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert all(value < 0 for value in scores["token_logprobs"][1:])
    assert "".join(scores["tokens"]) == choice["text"] and choice["text"].startswith(PROMPT)
    lengths = [len(token) for token in scores["tokens"]]
    assert scores["text_offset"] == [sum(lengths[:i]) for i in range(size)]
    # Several byte tokens may be spelled alike, so there can be fewer than asked for.
    assert all(1 <= len(top) <= 6 for top in scores["top_logprobs"][1:])
    (plain,) = run.complete(PROMPT, logprobs=5, max_tokens=1)["choices"]
    assert plain["logprobs"]["token_logprobs"] == scores["token_logprobs"][-1:]

  def test_nothing_but_scores(self, run):
    reply = run.complete(PROMPT, echo=True, logprobs=1, max_tokens=0)
    (choice,) = reply["choices"]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT.encode())
    assert reply["usage"]["completion_tokens"] == 0
    (one,) = run.complete("a", echo=True, logprobs=1, max_tokens=0)["choices"]
    assert one["logprobs"]["token_logprobs"] == [None]
    whole = run.complete(PROMPT, echo=True, max_tokens=0)["choices"][0]
    assert whole["text"] == PROMPT and whole["logprobs"] is None

  def test_a_longer_prompt_scores_its_beginning_alike(self, run):
    """A teacher-forced output has the log-probability that it had when it was generated."""
    (said,) = run.complete(PROMPT, logprobs=0, max_tokens=9, return_token_ids=True)["choices"]
    ids = said["prompt_token_ids"] + said["token_ids"]
    (again,) = run.complete(ids, echo=True, logprobs=0, max_tokens=0)["choices"]
    expected = said["logprobs"]["token_logprobs"]
    assert again["logprobs"]["token_logprobs"][-9:] == pytest.approx(expected, abs=1e-4)

  def test_a_list_of_prompts_as_lm_eval_sends_it(self, run):
    prompts = [list(b"one"), list(b"two words"), list(b"three")]
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234, "temperature": 0}
    together = run.complete(prompts, **fields)["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
      (alone,) = run.complete([prompt], **fields)["choices"]
      assert alone["logprobs"] == choice["logprobs"]

  def test_streamed_scores_equal_the_whole(self, run):
    fields = {"echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    (whole,) = run.complete(PROMPT, **fields)["choices"]
    scores = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for chunk in run.stream(TEXT, {"prompt": PROMPT} | fields):
      (choice,) = chunk["choices"]
      text += choice["text"]
      for name, values in scores.items():
        values += choice["logprobs"][name]
    assert scores == whole["logprobs"] and text == whole["text"]

  def test_prompt_logprobs_have_a_field_of_their_own(self, run):
    (choice,) = run.complete("Hello", prompt_logprobs=2, max_tokens=2)["choices"]
    rows = choice["prompt_logprobs"]
    assert rows[0] is None and len(rows) == 5
    for token, row in zip(b"ello", rows[1:], strict=True):
      assert row[str(token)]["decoded_token"] == chr(token) and len(row) in (2, 3)
      ranks = sorted(entry["rank"] for entry in row.values())
      assert ranks[:2] == [1, 2]
    assert choice["logprobs"] is None and choice["text"]
    reply = run.chat(prompt_logprobs=0, max_tokens=1)
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    nothing = run.complete("Hello", prompt_logprobs=2, max_tokens=0)["choices"][0]
    assert nothing["prompt_logprobs"] == rows and nothing["text"] == ""


def test_token_ids_are_returned(run):
  reply = run.complete("Hi", max_tokens=4, return_token_ids=True, n=2)
  for choice in reply["choices"]:
    assert choice["prompt_token_ids"] == list(b"Hi") and len(choice["token_ids"]) == 4
  chat = run.chat(max_tokens=4, return_token_ids=True)
  assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
  body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
  body |= {"ignore_eos": True, "return_token_ids": True}
  chunks = run.stream(CHAT, body)
  assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
  assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
  streamed = sum((chunk["choices"][0]["token_ids"] for chunk in chunks), [])
  assert streamed == chat["choices"][0]["token_ids"]
  assert "token_ids" not in run.complete("Hi", max_tokens=1)["choices"][0]


def test_options_change_what_is_drawn(run):
  ask = lambda **f: run.complete("Hello", max_tokens=12, return_token_ids=True, **f)["choices"][0]
  plain = ask()["token_ids"]
  assert set(ask(logit_bias={"65": 100})["token_ids"]) == {65}
  assert set(ask(allowed_token_ids=[66, 67])["token_ids"]) <= {66, 67}
  often = ask(logit_bias={"65": 8}, frequency_penalty=2, presence_penalty=2)["token_ids"]
  assert 1 < len(set(often)) and 65 in often
  assert ask(repetition_penalty=1.9, presence_penalty=1)["token_ids"] != plain
  assert ask(presence_penalty=0, frequency_penalty=0, repetition_penalty=1)["token_ids"] == plain


def test_min_tokens_and_the_length(run):
  plain = run.complete("Hello", max_tokens=12, return_token_ids=True)["choices"][0]["token_ids"]
  stop = {"stop_token_ids": [plain[1]], "return_token_ids": True}
  (early,) = run.complete("Hello", max_tokens=12, **stop)["choices"]
  assert early["finish_reason"] == "stop" and len(early["token_ids"]) <= 2
  (late,) = run.complete("Hello", max_tokens=12, min_tokens=12, **stop)["choices"]
  assert len(late["token_ids"]) == 12 and plain[1] not in late["token_ids"]
  (short,) = run.complete("Hello", max_tokens=3, min_tokens=9, **stop)["choices"]
  assert len(short["token_ids"]) == 3 and short["finish_reason"] == "length"


def test_twenty_alternatives(run):
  (choice,) = run.chat(max_tokens=2, logprobs=True, top_logprobs=20)["choices"]
  for token in choice["logprobs"]["content"]:
    values = [other["logprob"] for other in token["top_logprobs"]]
    assert len(values) == 20 and values == sorted(values, reverse=True) and values[-1] > -50
