"""The OpenAPI 3.1 document, from the structs that validate requests and make responses."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from jaxserve.server import protocol, shapes

_JSON, _EVENTS = "application/json", "text/event-stream"
_ERRORS = {
  400: "The request cannot be served; `param` names the field.",
  401: "The API key is missing or wrong.",
  404: "There is no such model.",
  413: "The body is too large.",
  429: "The queue is full; come again after `retry-after` seconds.",
  500: "The engine failed.",
  503: "The server is shutting down, or the engine has failed.",
  504: "The request took longer than the server allows.",
}


@dataclasses.dataclass(frozen=True)
class _Operation:
  """One endpoint: what it takes and gives. `chunk` is what a stream of it consists of."""

  method: str
  path: str
  summary: str
  reply: type[Struct] | None
  request: type[Struct] | None = None
  chunk: type[Struct] | None = None
  errors: tuple[int, ...] = ()
  unavailable: type[Struct] = protocol.ErrorReply


_GENERATES = (400, 401, 404, 413, 429, 500, 503, 504)
_READS = (400, 401, 404, 413, 503)
OPERATIONS = (
  _Operation(
    "post", "/v1/completions", "Continue a text", protocol.CompletionReply,
    protocol.CompletionRequest, protocol.CompletionReply, _GENERATES,
  ),
  _Operation(
    "post", "/v1/chat/completions", "Continue a conversation", protocol.ChatReply,
    protocol.ChatRequest, protocol.ChatChunk, _GENERATES,
  ),
  _Operation("get", "/v1/models", "List the models", protocol.ModelList, errors=(401,)),
  _Operation("get", "/v1/models/{name}", "Show a model", protocol.ModelCard, errors=(401, 404)),
  _Operation(
    "post", "/tokenize", "Text or conversation to token ids", protocol.TokenizeReply,
    protocol.TokenizeRequest, errors=_READS,
  ),
  _Operation(
    "post", "/detokenize", "Token ids to text", protocol.DetokenizeReply,
    protocol.DetokenizeRequest, errors=_READS,
  ),
  _Operation(
    "get", "/tokenizer_info", "Describe the tokenizer", protocol.TokenizerInfo, errors=(401,)
  ),
  _Operation(
    "get", "/health", "Tell whether requests are taken", protocol.Health, errors=(503,),
    unavailable=protocol.Health,
  ),
  _Operation(
    "get", "/ping", "As /health", protocol.Health, errors=(503,), unavailable=protocol.Health
  ),
  _Operation("get", "/version", "Show the server's version", protocol.Version),
  _Operation(
    "get", "/live/settings", "Show the budget and its bounds", protocol.Settings, errors=(401,)
  ),
  _Operation(
    "post", "/live/settings", "Change the budget", protocol.Settings,
    protocol.SettingsRequest, errors=(400, 401, 413, 503),
  ),
  _Operation("get", "/metrics", "Prometheus metrics", None),
)  # fmt: skip


def document(version: str, bounds: shapes.Bounds) -> dict[str, Any]:
  """The whole document of a server, ready to be encoded."""
  structs = _structs()
  schemas, components = msgspec.json.schema_components(
    structs, ref_template="#/components/schemas/{name}"
  )
  by_struct = dict(zip(structs, schemas, strict=True))
  paths: dict[str, Any] = {}
  for operation in OPERATIONS:
    paths.setdefault(operation.path, {})[operation.method] = _describe(operation, by_struct)
  paths["/v1/models/{name}"]["get"]["parameters"] = [
    {"name": "name", "in": "path", "required": True, "schema": shapes.fields(bounds)["model"]}
  ]
  _refine(components, bounds)
  return {
    "openapi": "3.1.0",
    "info": {"title": "jaxserve", "version": version},
    "paths": paths,
    "components": {
      "schemas": components,
      "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    },
  }


def _structs() -> Sequence[type[Struct]]:
  named: list[type[Struct]] = [protocol.ErrorReply, protocol.Health]
  for operation in OPERATIONS:
    named += [s for s in (operation.reply, operation.request, operation.chunk) if s is not None]
  return list(dict.fromkeys(named))


def _describe(operation: _Operation, schemas: Mapping[type[Struct], Any]) -> dict[str, Any]:
  content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
  if operation.reply is not None:
    content = {_JSON: {"schema": schemas[operation.reply]}}
  if operation.chunk is not None:
    # A chunk, or an error that came after the first of them; at the end, [DONE].
    event = {"anyOf": [schemas[operation.chunk], schemas[protocol.ErrorReply]]}
    chunk = {"type": "string", "contentMediaType": _JSON, "contentSchema": event}
    data = {"anyOf": [{"type": "string", "const": "[DONE]"}, chunk]}
    content[_EVENTS] = {"schema": {"type": "object", "properties": {"data": data}}}
  responses = {"200": {"description": "The answer.", "content": content}}
  for status in operation.errors:
    body = operation.unavailable if status == 503 else protocol.ErrorReply
    responses[str(status)] = {
      "description": _ERRORS[status],
      "content": {_JSON: {"schema": schemas[body]}},
    }
  described: dict[str, Any] = {
    "operationId": f"{operation.method}_{operation.path.strip('/').replace('/', '_')}",
    "summary": operation.summary,
    "responses": responses,
  }
  if 401 in operation.errors:
    described["security"] = [{}, {"key": []}]
  if operation.request is not None:
    schema = schemas[operation.request]
    described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
  if "{name}" in operation.path:
    described["operationId"] = "get_v1_model"
  return described


def _refine(components: dict[str, Any], bounds: shapes.Bounds) -> None:
  """Has the fields of requests say which values they take, not only of which type."""
  common, own = shapes.fields(bounds), shapes.own_fields()
  requests = [op.request.__name__ for op in OPERATIONS if op.request is not None]
  for name in (*requests, "StructuredOutputs"):
    fields = components[name]["properties"]
    for field, schema in ({**common, **own.get(name, {})}).items():
      if field not in fields:
        continue
      if "default" not in fields[field]:
        fields[field] = schema
      else:  # it may be left out, or null
        kinds = schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
        fields[field] = {"anyOf": [*kinds, {"type": "null"}], "default": None}
  for name, rule in shapes.structs().items():
    components[name] |= rule
