"""Tools of a chat: whether the model may call them, and what it writes when it has to.

A call that is asked for (`tool_choice` "required", or a function by name) is a grammar, so that the
name is one of the tools' and the arguments are of its schema; there is no other text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.errors import conflicting, invalid, unsupported
from jaxserve.server.grammar import Wanted
from jaxserve.server.protocol import ChatRequest
from jaxserve.server.shapes import MAX_TOOLS
from jaxserve.text import tool_calls

Tool = Mapping[str, Any]

# As templates write calls: no line breaks, a space behind each comma and colon.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tools_of(request: ChatRequest, template: str | None) -> Sequence[Tool] | None:
  """The tools that the model may call, if it may.

  Raises:
    ApiError: they are none, or the model has none.
  """
  tools, name = request.tools or [], _chosen_name(request.tool_choice)
  if len(tools) > MAX_TOOLS:
    raise invalid("tools", f"tools: {len(tools)} are given; at most {MAX_TOOLS} are taken")
  for tool in tools:
    match tool:
      case {"type": "function", "function": {"name": str(), **rest}}:
        if isinstance(rest.get("parameters"), dict | None):
          continue
    raise invalid("tools", "tools: each must be {type: 'function', function: {name, ...}}")
  if request.tool_choice in (None, "none", "auto"):
    if not tools or request.tool_choice == "none":
      return None
  elif not tools:
    raise conflicting("tool_choice", "tool_choice: needs tools")
  if name is not None and name not in [tool["function"]["name"] for tool in tools]:
    raise conflicting("tool_choice", f"tool_choice: {name!r} is none of the tools")
  if "tools" not in (template or "") or tool_calls.BEGIN not in (template or ""):
    why = f"this model's chat template has no tools, or not as {tool_calls.BEGIN}"
    raise unsupported("tools", why)
  return tools


def wanted_calls(request: ChatRequest) -> Wanted | None:
  """What a reply that has to call a tool must be; None if it need not. Ask `tools_of` first."""
  name = _chosen_name(request.tool_choice)
  if name is None and request.tool_choice != "required":
    return None
  functions = [tool["function"] for tool in request.tools or ()]
  functions = [f for f in functions if name is None or f["name"] == name]
  several = name is None and request.parallel_tool_calls is not False
  rules = ["start: call" + (' ("\\n" call)*' if several else "")]
  rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(functions))))
  rules += [f"call_{at}: {_call(function)}" for at, function in enumerate(functions)]
  return Wanted("tool_choice", "lark", "\n".join(rules))


def _call(function: Mapping[str, Any]) -> str:
  head = f'{tool_calls.BEGIN}\n{{"name": {json.dumps(function["name"])}, "arguments": '
  given = function.get("parameters")
  schema = {"x-guidance": _SPACING, **(given or _NO_PARAMETERS)}
  tail = "}\n" + tool_calls.END
  return f"{json.dumps(head)} %json {json.dumps(schema)} {json.dumps(tail)}"


def _chosen_name(choice: Any) -> str | None:
  """The function that has to be called.

  Raises:
    ApiError: the choice is none of those there are.
  """
  match choice:
    case None | "none" | "auto" | "required":
      return None
    case {"type": "function", "function": {"name": str() as name}}:
      return name
  raise invalid(
    "tool_choice",
    f"tool_choice={choice!r}: must be none, auto, required or {{type: 'function', "
    "function: {name}}",
  )
