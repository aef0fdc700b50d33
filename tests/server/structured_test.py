"""Outputs that have to be something: JSON, of a schema, of a regular expression, of a list."""

import concurrent.futures
import dataclasses
import json
import re
import time

import pytest

from tests.testing import servers

pytest.importorskip("llguidance")
TEXT = "/v1/completions"
SCHEMA = {
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 4},
    "n": {"type": "integer", "maximum": 9},
  },
  "required": ["name", "n"],
  "additionalProperties": False,
}


@pytest.fixture(scope="module")
def run():
  with servers.running() as run:
    yield run
    servers.eventually(run.is_empty)
    assert run.metric("retraces") == 0


def of_schema(schema):
  return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema(run, temperature):
  ask = {"response_format": of_schema(SCHEMA), "temperature": temperature, "seed": 3}
  reply = run.chat("x", max_tokens=60, n=2, logit_bias={str(b): -100 for b in b" \n\t\r"}, **ask)
  for choice in reply["choices"]:
    value = json.loads(choice["message"]["content"])
    assert set(value) == {"name", "n"} and isinstance(value["n"], int) and len(value["name"]) <= 4
    assert choice["finish_reason"] == "stop"


def test_any_object(run):
  bias = {str(b): -100 for b in (*range(0x20), 0x20, *range(0x80, 0x100))} | {"125": 30}
  reply = run.chat("x", max_tokens=40, response_format={"type": "json_object"}, logit_bias=bias)
  assert isinstance(json.loads(reply["choices"][0]["message"]["content"]), dict)


@pytest.mark.parametrize(
  "fields, pattern",
  [
    ({"guided_regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
    ({"structured_outputs": {"regex": "(yes|no)!"}}, "(yes|no)!"),
    ({"guided_choice": ["red", 'gr"een']}, 'red|gr"een'),
    ({"structured_outputs": {"choice": ["one"]}}, "one"),
    ({"guided_grammar": 'start: "a" "b"+ "."\n'}, r"ab+\."),
    ({"guided_json": {"enum": [7]}}, "7"),
  ],
  ids=str,
)
def test_vllm_s_fields(run, fields, pattern):
  (choice,) = run.complete("x", max_tokens=70, logit_bias={"46": 5}, **fields)["choices"]
  assert re.fullmatch(pattern, choice["text"]), choice
  assert choice["finish_reason"] == "stop"


def test_a_stream_equals_the_whole_and_neighbours_are_free(run):
  fields = {"guided_regex": "[0-9]{6}", "max_tokens": 20, "temperature": 1, "seed": 5}
  plain = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
  alone = run.complete("y", **plain)["choices"]
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    streams = [pool.submit(run.stream, TEXT, {"prompt": "x"} | fields) for _ in range(2)]
    others = [pool.submit(run.complete, "y", **plain) for _ in range(2)]
    texts = ["".join(c["choices"][0]["text"] for c in s.result()) for s in streams]
    assert all(other.result()["choices"] == alone for other in others)
  assert texts[0] == texts[1] == run.complete("x", **fields)["choices"][0]["text"]
  assert re.fullmatch("[0-9]{6}", texts[0])


def test_the_length_ends_it_all_the_same(run):
  (choice,) = run.complete("x", max_tokens=3, guided_regex="[0-9]{9}")["choices"]
  assert choice["finish_reason"] == "length" and re.fullmatch("[0-9]{3}", choice["text"])


BAD = {
  "type": ({"response_format": {"type": "xml"}}, "response_format"),
  "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
  "bad schema": ({"response_format": of_schema({"type": "nothing"})}, "response_format"),
  "false schema": ({"guided_json": "{"}, "guided_json"),
  "unsatisfiable": ({"guided_json": {"enum": []}}, "guided_json"),
  "bad regex": ({"guided_regex": "["}, "guided_regex"),
  "bad grammar": ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
  "no choice": ({"guided_choice": []}, "guided_choice"),
  "two": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
  "min_tokens": ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
  "large": ({"guided_regex": "a" * 300_000}, "guided_regex"),
  "explosive": ({"guided_regex": "(((a{1,999}){1,999}){1,999}){1,999}"}, None),
  "deep": ({"guided_json": "[" * 500}, "guided_json"),
  "overlap": ({"guided_regex": "(.*a.{40}.*b.{40}){50}"}, None),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_is_a_400_soon(run, name):
  fields, param = BAD[name]
  begin = time.monotonic()
  reply = run.post(TEXT, {"prompt": "x", "max_tokens": 5} | fields)
  assert time.monotonic() - begin < 10
  if param is None:  # it may be served; what matters is that it takes no time
    assert reply.status_code in (200, 400)
    return
  assert reply.status_code == 400, reply.text
  assert reply.json()["error"]["param"] == param


TOOLS_TEMPLATE = (
  "{% if tools %}<tool_call>{{ tools|length }}{% endif %}"
  "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'


class TestTools:
  @pytest.fixture
  def tooled(self):
    with servers.running(
      dataclasses.replace(servers.served(), chat_template=TOOLS_TEMPLATE)
    ) as run:
      yield run

  def test_a_call_is_told_apart(self, tooled):
    fields = {"tools": [TOOL], "guided_choice": [CALL], "max_tokens": 60}
    (choice,) = tooled.chat("x", **fields)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'} and call["type"] == "function"
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    body = {"messages": [{"role": "user", "content": "x"}]} | fields
    chunks = tooled.stream("/v1/chat/completions", body)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    (streamed,) = [d["tool_calls"][0] for d in deltas if d.get("tool_calls")]
    assert streamed["function"] == call["function"] and streamed["index"] == 0
    assert "".join(d.get("content") or "" for d in deltas) == ""
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=tooled.url + "/v1", api_key="x", max_retries=0)
    with client.chat.completions.stream(
      model=servers.NAME, messages=body["messages"], tools=[TOOL], max_tokens=60,
      extra_body={"guided_choice": [CALL]},
    ) as stream:  # fmt: skip
      final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'

  def test_tools_change_the_prompt_unless_the_choice_is_none(self, tooled):
    size = lambda **f: tooled.chat("x", max_tokens=1, **f)["usage"]["prompt_tokens"]
    assert size(tools=[TOOL]) > size(tools=[TOOL], tool_choice="none") == size()

  def test_what_is_not_served(self, run, tooled):
    ask = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    post = lambda server, body: server.post("/v1/chat/completions", body).json()["error"]["param"]
    assert post(run, ask) == "tools"  # its template has none
    assert post(tooled, ask | {"tool_choice": "required"}) == "tool_choice"
    assert post(tooled, ask | {"tools": [{"type": "x"}]}) == "tools"
