"""Tool calls taken out of a text, whatever the pieces it comes in."""

import json

import pytest

from jaxserve.text.tool_calls import Call, ToolCalls

CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call>'
GET = Call("get", '{"city": "Zürich"}')

CASES = {
  "no call": ("a < b <tool", "a < b <tool", []),
  "a call": (CALL, "", [GET]),
  "text around": ("Wait. " + CALL + " done", "Wait.  done", [GET]),
  "two": (CALL + "\n" + CALL, "\n", [GET, GET]),
  "arguments as text": (
    '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", [Call("f", '{"a":1}')],
  ),
  "no JSON": ("<tool_call>hm</tool_call>!", "<tool_call>hm</tool_call>!", []),
  "no name": ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
  "cut off": ('ok <tool_call>{"name": "g', 'ok <tool_call>{"name": "g', []),
  "almost": ("<tool_<tool_call>{}</tool_call>", "<tool_<tool_call>{}</tool_call>", []),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", CASES)
def test_calls_and_text(name, size):
  given, text, calls = CASES[name]
  watch, out, found = ToolCalls(), "", []
  for at in range(0, len(given), size):
    out += watch.push(given[at : at + size])
    found += watch.take()
  out += watch.flush()
  assert (out, found + watch.take()) == (text, calls)
  for call in calls:
    json.loads(call.arguments)


def test_text_goes_out_at_once():
  watch = ToolCalls()
  assert watch.push("hello <") == "hello " and watch.push("b>") == "<b>"
