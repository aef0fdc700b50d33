"""Tool calls in a text that comes in pieces, in the form that Hermes, Qwen and others have:

<tool_call>
{"name": ..., "arguments": {...}}
</tool_call>
"""

import dataclasses
import json

from jaxserve.text.stop_strings import StopStrings

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclasses.dataclass(frozen=True)
class Call:
  """A call that the model asks for; the arguments are JSON."""

  name: str
  arguments: str


class ToolCalls:
  """Takes calls out of a text; what is no call, though it begins like one, stays text."""

  def __init__(self) -> None:
    self._calls: list[Call] = []
    self._inside = False
    self._body = ""
    self._watch = StopStrings([BEGIN])

  def push(self, text: str) -> str:
    """Takes more text; returns what is no part of a call."""
    out = ""
    while text:
      if self._inside:
        self._body += text
        body, found, text = self._body.partition(END)
        if not found:
          return out
        self._inside, self._body = False, ""
        call = _parse(body)
        if call is None:
          out += BEGIN + body + END
        else:
          self._calls.append(call)
      else:
        whole = self._watch.held + text
        before = self._watch.push(text)
        out += before
        if self._watch.matched is None:
          return out
        text = whole[len(before) + len(BEGIN) :]
        self._inside, self._watch = True, StopStrings([BEGIN])
    return out

  def flush(self) -> str:
    """The text has ended: what was held back, and a call that was not finished."""
    held = BEGIN + self._body if self._inside else self._watch.flush()
    self._inside, self._body = False, ""
    return held

  def take(self) -> list[Call]:
    """The calls since the last time."""
    calls, self._calls = self._calls, []
    return calls


def _parse(body: str) -> Call | None:
  try:
    given = json.loads(body)
  except (ValueError, RecursionError):
    return None
  match given:
    case {"name": str() as name, "arguments": dict() as arguments}:
      return Call(name, json.dumps(arguments, ensure_ascii=False))
    case {"name": str() as name, "arguments": str() as arguments}:
      return Call(name, arguments)
  return None
