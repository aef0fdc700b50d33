"""Every endpoint as clients use it: forms, streams, stop strings, errors, the openai types."""

import json
import math
import re

import pytest

from jaxserve.text.tokenizer import ByteTokenizer
from tests.testing import servers
from tests.testing.servers import MAX_MODEL_LEN, NAME

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def run():
  tokens = servers.alone(list(b"Hello"), 12)
  with servers.running() as run:
    run.tokens = tokens
    yield run
    servers.eventually(run.is_empty)
    assert run.metric("retraces") == 0


class TestCompletions:
  def test_tokens_are_those_of_the_engine(self, run):
    reply = run.complete(list(b"Hello"), max_tokens=8, skip_special_tokens=False)
    text = ByteTokenizer().decode(run.tokens[:8], skip_special_tokens=False)
    assert reply["choices"][0]["text"] == text
    assert reply["object"] == "text_completion" and reply["model"] == NAME
    assert reply["usage"] == {
      "prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13,
      "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None

  def test_four_forms_of_a_prompt(self, run):
    ids = list(b"Hello")
    one = run.complete("Hello")["choices"]
    assert run.complete(ids)["choices"] == one
    assert run.complete(["Hello"])["choices"] == one
    assert run.complete([ids])["choices"] == one
    three = run.complete([ids, list(b"Bye"), ids])
    texts = [c["text"] for c in three["choices"]]
    assert texts[0] == texts[2] == one[0]["text"] != texts[1]
    assert [c["index"] for c in three["choices"]] == [0, 1, 2]
    assert three["usage"]["prompt_tokens"] == 13 and three["usage"]["completion_tokens"] == 48

  def test_n_choices_differ_and_are_reproducible(self, run):
    fields = {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 12}
    first, again = (run.complete(**fields) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3 and first["choices"] == again["choices"]
    assert first["usage"]["prompt_tokens"] == 5 and first["usage"]["completion_tokens"] == 36
    alone = run.complete(seed=9, temperature=1, max_tokens=12)
    assert alone["choices"][0]["text"] == texts[2]

  def test_no_seed_is_a_new_text_each_time(self, run):
    texts = [run.complete(temperature=1, max_tokens=12)["choices"][0]["text"] for _ in range(3)]
    assert len(set(texts)) == 3

  def test_echo(self, run):
    plain = run.complete(max_tokens=4)["choices"][0]["text"]
    assert run.complete(max_tokens=4, echo=True)["choices"][0]["text"] == "Hello" + plain
    body = {"prompt": "Hello", "max_tokens": 4, "echo": True, "temperature": 0, "ignore_eos": True}
    chunks = run.stream(TEXT, body)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello" + plain

  def test_logprobs_add_up_to_the_text(self, run):
    (choice,) = run.complete(max_tokens=9, logprobs=3)["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] and len(logprobs["tokens"]) == 9
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
      assert max(top.values()) == pytest.approx(chosen, abs=1e-5)  # greedy
      assert 1 <= len(top) <= 4 and all(value <= 0 for value in top.values())
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(9)]

  def test_stop_token_ids(self, run):
    ids = run.tokens
    reply = run.complete(max_tokens=12, stop_token_ids=[ids[5]])
    position = ids.index(ids[5])
    assert reply["usage"]["completion_tokens"] == position + 1
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == ids[5]


class TestChat:
  def test_a_reply(self, run):
    reply = run.chat(max_completion_tokens=6)
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    same = run.complete(prompt, max_tokens=6)
    assert same["choices"][0]["text"] == choice["message"]["content"]
    for usage in (reply["usage"], same["usage"]):
      assert 0 <= usage.pop("prompt_tokens_details")["cached_tokens"] < usage["prompt_tokens"]
    assert same["usage"] == reply["usage"]

  def test_parts_are_joined(self, run):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert run.chat(parts, max_tokens=4)["choices"] == run.chat(max_tokens=4)["choices"]

  def test_without_max_tokens_it_ends_at_the_model_s_length(self, run):
    usage = run.chat()["usage"]
    assert usage["total_tokens"] == MAX_MODEL_LEN

  def test_logprobs(self, run):
    (choice,) = run.chat(max_tokens=7, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == choice["message"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert all(token["top_logprobs"][0]["bytes"] == token["bytes"] for token in content)

  def test_a_token_that_is_not_among_the_top_has_its_logprob(self, run):
    fields = {"max_tokens": 30, "logprobs": True, "top_logprobs": 8, "temperature": 2, "seed": 1}
    (choice,) = run.chat(**fields)["choices"]
    outside = 0
    for token in choice["logprobs"]["content"]:
      top = {tuple(other["bytes"]): other["logprob"] for other in token["top_logprobs"]}
      assert 0 < sum(map(math.exp, top.values())) < 1
      if tuple(token["bytes"]) in top:
        assert top[tuple(token["bytes"])] == pytest.approx(token["logprob"], abs=1e-5)
      else:
        outside += 1
        assert token["logprob"] <= min(top.values())
    assert outside


class TestStreams:
  def test_equals_the_whole(self, run):
    for stop in (None, ["\x00"], "e"):
      body = {"prompt": "Hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
      body |= {"stop": stop, "n": 2, "logprobs": 1}
      whole = run.complete(**body)
      texts, tokens, ends = ["", ""], [[], []], [[], []]
      ids = set()
      for chunk in run.stream(TEXT, body):
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert not ends[index] and "usage" not in chunk
        texts[index] += choice["text"]
        tokens[index] += choice["logprobs"]["tokens"]
        ends[index] += [choice["finish_reason"]] if choice["finish_reason"] else []
        ids.add((chunk["id"], chunk["created"], chunk["object"]))
      assert len(ids) == 1
      for choice, text, own, end in zip(whole["choices"], texts, tokens, ends, strict=True):
        assert choice["text"] == text and choice["logprobs"]["tokens"] == own
        assert [choice["finish_reason"]] == end

  def test_usage_comes_last(self, run):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "ignore_eos": True}
    chunks = run.stream(CHAT, body | {"stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 5
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "length"
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    chunks = run.stream(CHAT, body | {"stream_options": continuous})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-2:] == [5, 5]
    assert "usage" not in run.stream(CHAT, body | {"stream_options": {}})[-1]

  def test_stop_strings_do_not_leak(self, run):
    text = run.complete(max_tokens=24)["choices"][0]["text"]
    stop = text[9:12]
    body = {"prompt": "Hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    chunks = run.stream(TEXT, body | {"stop": ["never", stop]})
    streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert streamed == text[: text.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == stop
    kept = run.complete(max_tokens=24, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == streamed + stop


class TestOthers:
  def test_models(self, run):
    (card,) = run.get("/v1/models").json()["data"]
    assert card["id"] == NAME and card["max_model_len"] == MAX_MODEL_LEN
    assert run.get(f"/v1/models/{NAME}").json() == card
    assert run.get("/v1/models/other").status_code == 404

  def test_tokenize_and_back(self, run):
    reply = run.post("/tokenize", {"prompt": "Héllo", "return_token_strs": True}).json()
    assert reply["tokens"] == list("Héllo".encode()) and reply["count"] == 6
    assert reply["max_model_len"] == MAX_MODEL_LEN and len(reply["token_strs"]) == 6
    assert run.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": "Héllo"}
    messages = [{"role": "user", "content": "x"}]
    ids = run.post("/tokenize", {"messages": messages}).json()["tokens"]
    text = run.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"

  def test_state(self, run):
    assert run.get("/health").json() == {"status": "ok", "reason": None}
    assert run.get("/ping").status_code == 200 and "version" in run.get("/version").json()
    info = run.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and info["vocab_size"] == 259

  def test_request_ids_are_echoed_if_they_are_harmless(self, run):
    for given, echoed in (("abc-1", True), ("x" * 1000, False), ("a b", False)):
      got = run.get("/health", headers={"x-request-id": given}).headers["x-request-id"]
      assert (got == given) is echoed and got

  def test_openapi_describes_every_route(self, run):
    document = run.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1") and document["info"]["version"]
    text = json.dumps(document)
    names = set(document["components"]["schemas"])
    assert set(re.findall(r"#/components/schemas/([^\"]+)", text)) <= names
    for path, methods in document["paths"].items():
      for method, operation in methods.items():
        assert operation["operationId"] and "200" in operation["responses"]
        reply = run.client.request(method, path.replace("{name}", NAME), content="{")
        assert reply.status_code == (200 if method == "get" else 400)
    fields = document["components"]["schemas"]["ChatRequest"]
    assert {"messages", "stream_options", "seed"} <= set(fields["properties"])
    assert fields["required"] == ["messages"]

  def test_docs_is_a_page_without_outside_parts(self, run):
    reply = run.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "openapi.json" in reply.text and "http" not in reply.text


BAD = {
  "no object": (TEXT, "42", None),
  "a list": (TEXT, '["a"]', None),
  "broken": (TEXT, "{broken", None),
  "not UTF-8": (TEXT, b'{"prompt": "\xff\xfe"}', None),
  "surrogate": (TEXT, '{"prompt":"emoji \\ud83d"}', None),
  "deep": (TEXT, '{"prompt":' + "[" * 100_000, "prompt"),
  "deep in an unknown field": (TEXT, '{"prompt":"a","x":' + "[" * 100_000, None),
  "no prompt": (TEXT, "{}", "prompt"),
  "empty prompt": (TEXT, '{"prompt":""}', "prompt"),
  "empty list": (TEXT, '{"prompt":[]}', "prompt"),
  "empty in a list": (TEXT, '{"prompt":[[]]}', "prompt"),
  "mixed": (TEXT, '{"prompt":[[1,2],"a"]}', "prompt"),
  "negative token": (TEXT, '{"prompt":[-1]}', "prompt"),
  "echoed negative token": (TEXT, '{"prompt":[-1],"echo":true}', "prompt"),
  "token beyond": (TEXT, '{"prompt":[259]}', "prompt"),
  "huge token": (TEXT, '{"prompt":[9223372036854775808]}', "prompt"),
  "fraction": (TEXT, '{"prompt":[1.5]}', "prompt"),
  "bool": (TEXT, '{"prompt":[true]}', "prompt"),
  "NaN": (TEXT, '{"prompt":"a","temperature":NaN}', None),
  "cold": (TEXT, '{"prompt":"a","temperature":-0.1}', "temperature"),
  "hot": (TEXT, '{"prompt":"a","temperature":2.1}', "temperature"),
  "text for a number": (TEXT, '{"prompt":"a","temperature":"1"}', "temperature"),
  "top_p": (TEXT, '{"prompt":"a","top_p":1.1}', "top_p"),
  "top_k": (TEXT, '{"prompt":"a","top_k":-2}', "top_k"),
  "n": (TEXT, '{"prompt":"a","n":0}', "n"),
  "max_tokens": (TEXT, '{"prompt":"a","max_tokens":0}', "max_tokens"),
  "stop token": (TEXT, '{"prompt":"a","stop_token_ids":[99999999]}', "stop_token_ids"),
  "empty stop": (TEXT, '{"prompt":"a","stop":[""]}', "stop"),
  "logprobs": (TEXT, '{"prompt":"a","logprobs":21}', "logprobs"),
  "stream_options": (TEXT, '{"prompt":"a","stream_options":{}}', "stream_options"),
  "best_of": (TEXT, '{"prompt":"a","best_of":2}', "best_of"),
  "priority": (TEXT, '{"prompt":"a","priority":1}', "priority"),
  "huge priority": (TEXT, '{"prompt":"a","priority":99999999999}', "priority"),
  "logit_bias": (TEXT, '{"prompt":"a","logit_bias":{"x":1}}', "logit_bias"),
  "penalty": (TEXT, '{"prompt":"a","presence_penalty":2.5}', "presence_penalty"),
  "repetition": (TEXT, '{"prompt":"a","repetition_penalty":0}', "repetition_penalty"),
  "min_tokens": (TEXT, '{"prompt":"a","min_tokens":-1}', "min_tokens"),
  "bias of a token beyond": (TEXT, '{"prompt":"a","logit_bias":{"259":1}}', "logit_bias"),
  "strong bias": (TEXT, '{"prompt":"a","logit_bias":{"5":101}}', "logit_bias"),
  "allowed token": (TEXT, '{"prompt":"a","allowed_token_ids":[259]}', "allowed_token_ids"),
  "nothing allowed": (TEXT, '{"prompt":"a","allowed_token_ids":[]}', "allowed_token_ids"),
  "prompt_logprobs": (TEXT, '{"prompt":"a","prompt_logprobs":21}', "prompt_logprobs"),
  "streamed prompt_logprobs": (
    TEXT, '{"prompt":"a","prompt_logprobs":1,"stream":true}', "prompt_logprobs",
  ),
  "bad_words": (TEXT, '{"prompt":"a","bad_words":[""]}', "bad_words"),
  "messages": (CHAT, '{"messages":5}', "messages"),
  "no messages": (CHAT, '{"messages":[]}', "messages"),
  "no content": (CHAT, '{"messages":[{"role":"user","content":null}]}', "messages"),
  "a file": (CHAT, '{"messages":[{"role":"user","content":[{"type":"file"}]}]}', "messages"),
  "a part without a type": (
    CHAT, '{"messages":[{"role":"user","content":[{"text":"a"}]}]}', "messages",
  ),
  "response_format": (
    CHAT, '{"messages":[{"role":"user","content":"a"}],"response_format":{"type":"xml"}}',
    "response_format",
  ),
  "tools": (CHAT, '{"messages":[{"role":"user","content":"a"}],"tools":[{}]}', "tools"),
  "top without logprobs": (
    CHAT, '{"messages":[{"role":"user","content":"a"}],"top_logprobs":2}', "top_logprobs",
  ),
  "template variables": (
    CHAT, '{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"messages":1}}',
    "chat_template_kwargs",
  ),
  "tokenize nothing": ("/tokenize", "{}", "prompt"),
  "detokenize": ("/detokenize", '{"tokens":[259]}', "tokens"),
}  # fmt: skip


class TestErrors:
  @pytest.mark.parametrize("name", BAD)
  def test_a_bad_request_is_a_400_that_names_the_field(self, run, name):
    path, body, param = BAD[name]
    reply = run.client.post(path, content=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert isinstance(error["code"], str)

  def test_what_asks_for_nothing_is_taken(self, run):
    run.complete(
      max_tokens=1, best_of=1, logprobs=None, repetition_penalty=1.0, presence_penalty=0,
      logit_bias={}, min_tokens=0, priority=0, user="me", separate_reasoning=True, top_k=-1,
      response_format={"type": "text"}, stop=None, seed=-5, top_p=0, some_other_field=[1],
    )  # fmt: skip
    assert run.complete(top_k=10**12, max_tokens=1)

  @pytest.mark.parametrize("length", [MAX_MODEL_LEN, 10 * MAX_MODEL_LEN])
  def test_a_prompt_that_is_too_long(self, run, length):
    reply = run.post(TEXT, {"prompt": "x" * length})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == "context_length_exceeded"
    assert str(length) in error["message"] and str(MAX_MODEL_LEN) in error["message"]
    fits = run.complete("x" * (MAX_MODEL_LEN - 1))
    assert fits["usage"]["completion_tokens"] == 1

  def test_no_such_model_or_route(self, run):
    reply = run.post(CHAT, {"model": "nope", "messages": [{"role": "user", "content": "a"}]})
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
    assert run.get("/nowhere").json()["error"]["code"] == "not_found"
    assert run.get(TEXT).status_code == 405 and "error" in run.get(TEXT).json()
    allowed = run.client.options("/live/settings").headers["allow"]
    assert {"GET", "POST"} <= set(allowed.replace(" ", "").split(","))

  def test_bodies_have_a_limit(self, run):
    assert run.post(TEXT, {"prompt": "x" * 50_000}).json()["error"]["param"] == "prompt"
    announced = run.client.post(TEXT, content=b"x" * (17 << 20))
    assert announced.status_code == 413
    chunked = run.client.post(TEXT, content=(b"x" * (1 << 20) for _ in range(17)))
    assert chunked.status_code == 413 and chunked.json()["error"]["code"] == "body_too_large"


class TestOpenAITypes:
  """The client builds objects without checks, so pydantic is asked."""

  @pytest.fixture(autouse=True)
  def types(self):
    pytest.importorskip("openai")

  def check(self, kind, body):
    import pydantic

    pydantic.TypeAdapter(kind).validate_python(body)

  def test_models(self, run):
    from openai.types import Model

    self.check(Model, run.get("/v1/models").json()["data"][0])

  def test_replies(self, run):
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    self.check(Completion, run.complete(logprobs=2, n=2))
    self.check(ChatCompletion, run.chat(logprobs=True, top_logprobs=2, n=2, max_tokens=3))

  def test_chunks(self, run):
    from openai.types import Completion
    from openai.types.chat import ChatCompletionChunk

    options = {"stream_options": {"include_usage": True}, "max_tokens": 4, "n": 2}
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    for chunk in run.stream(CHAT, body | options):
      self.check(ChatCompletionChunk, chunk)
    for chunk in run.stream(TEXT, {"prompt": "Hi", "logprobs": 1} | options):
      for choice in chunk["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "length"  # null, as tools expect
      self.check(Completion, chunk)

  def test_errors(self, run):
    from openai.types.shared import ErrorObject

    self.check(ErrorObject, json.loads(run.client.post(TEXT, content="{").text)["error"])

  def test_the_client_itself(self, run):
    import openai

    client = openai.OpenAI(base_url=run.url + "/v1", api_key="x", max_retries=0)
    ask = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
    reply = client.chat.completions.create(**ask, max_tokens=4, extra_body={"ignore_eos": True})
    assert reply.usage.completion_tokens == 4 and reply._request_id
    with client.chat.completions.stream(**ask, max_tokens=3) as stream:
      assert "content.done" in {event.type for event in stream}
    with pytest.raises(openai.NotFoundError) as caught:
      client.chat.completions.create(model="nope", messages=ask["messages"])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
