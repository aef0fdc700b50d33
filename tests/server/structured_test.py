"""Outputs that have to be something: JSON, of a schema, of a regular expression, of a list."""

import concurrent.futures
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


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'


SHORT_CALL = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
NO_PARAMETERS = {"type": "function", "function": {"name": "now"}}
LOOK_UP = {
  "name": 'look"up',
  "parameters": {
    "$defs": {"kind": {"enum": ["a", "b"]}},
    "type": "object",
    "properties": {"kind": {"$ref": "#/$defs/kind"}},
    "required": ["kind"],
    "additionalProperties": False,
  },
}


@pytest.fixture(scope="module")
def tooled():
  with servers.running(servers.with_tools()) as run:
    yield run
    servers.eventually(run.is_empty)


class TestTools:
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
    assert post(tooled, ask | {"tools": [{"type": "x"}]}) == "tools"

  def test_a_call_that_has_to_be(self, tooled):
    """Whatever the model, the reply is a call of one of the tools, its arguments of the schema."""
    tools = [TOOL, {"type": "function", "function": LOOK_UP}, NO_PARAMETERS]
    for choice in ("required", {"type": "function", "function": {"name": 'look"up'}}):
      fields = {"tools": tools, "tool_choice": choice, "temperature": 1, "max_tokens": 90}
      bias = {str(b): -100 for b in b" \n\t\r\\"} | {"125": 20, "34": 10}  # be brief
      for seed in range(3):
        reply = tooled.chat("x", seed=seed, logit_bias=bias, n=2, **fields)
        for choice_ in reply["choices"]:
          assert choice_["finish_reason"] in ("tool_calls", "length")
          for call in choice_["message"].get("tool_calls", []):
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            assert name == 'look"up' or choice == "required" and name in ("f", "now")
            assert isinstance(arguments, dict)
            if name == 'look"up':
              assert set(arguments) == {"kind"} and arguments["kind"] in ("a", "b")
            if name == "now":
              assert arguments == {}
        if choice != "required":
          assert [len(c["message"]["tool_calls"]) for c in reply["choices"]] == [1, 1]
          assert all(c["message"]["content"] is None for c in reply["choices"])

  def test_one_call_or_several(self, tooled):
    fields = {"tools": [NO_PARAMETERS], "tool_choice": "required", "max_tokens": 95}
    fields |= {"logit_bias": {"10": 50}}  # a line break: another one
    ask = lambda **f: tooled.chat("", **fields, **f)["choices"][0]
    assert len(ask()["message"]["tool_calls"]) == 1  # the model's length ends the second
    one = ask(parallel_tool_calls=False)
    assert one["finish_reason"] == "tool_calls" and len(one["message"]["tool_calls"]) == 1
    several = {"tools": [TOOL], "guided_choice": [SHORT_CALL + "abc"], "max_tokens": 95}
    whole = tooled.chat("", **several)
    assert whole["choices"][0]["message"]["content"] == "abc"
    assert whole["usage"]["completion_tokens"] == len(SHORT_CALL) + 3
    first = tooled.chat("", parallel_tool_calls=False, **several)
    (choice,) = first["choices"]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    assert first["usage"]["completion_tokens"] == len(SHORT_CALL)
    body = {"messages": [{"role": "user", "content": ""}], "parallel_tool_calls": False} | several
    chunks = tooled.stream("/v1/chat/completions", body)
    assert sum("tool_calls" in c["choices"][0]["delta"] for c in chunks) == 1

  @pytest.mark.parametrize(
    "fields, param, code",
    [
      ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
      ({"tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
      ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "invalid_value"),
      ({"tool_choice": "required", "tools": []}, "tool_choice", "conflicting_fields"),
      ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice",
       "conflicting_fields"),
      ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex", "conflicting_fields"),
      ({"tool_choice": "required", "min_tokens": 2}, "min_tokens", "conflicting_fields"),
      ({"tool_choice": "required", "tools": [{"type": "function", "function":
        {"name": "f", "parameters": {"type": "nothing"}}}]}, "tool_choice", "invalid_structure"),
      ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools",
       "invalid_value"),
      ({"tools": [TOOL] * 129}, "tools", "invalid_value"),
    ],
    ids=str,
  )  # fmt: skip
  def test_choices_that_are_none(self, tooled, fields, param, code):
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]} | fields
    reply = tooled.post("/v1/chat/completions", body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code)


def test_a_structure_without_some_words(run):
  fields = {"guided_choice": ["cat", "cow", "ox"], "max_tokens": 9, "temperature": 1}
  ask = lambda **f: {
    run.complete("x", seed=s, **fields, **f)["choices"][0]["text"] for s in range(4)
  }
  assert ask(bad_words=["ca", "co"], logit_bias={"99": -100}) == {"ox"}
  assert ask(bad_words=["ca", "ox"], logit_bias={"99": 50}) == {"cow"}
  reply = run.post(TEXT, {"prompt": "x", "bad_words": ["c", "ox"]} | fields)
  assert reply.status_code == 400 and reply.json()["error"]["code"] == "structure_failed"
