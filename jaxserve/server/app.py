"""The routes, as a Starlette application."""

import asyncio
import functools
import hmac
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable
from importlib import metadata, resources
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.engine import clock
from jaxserve.server import bodies, intake, metrics, openapi, protocol, replies, shapes, steps
from jaxserve.server.errors import ApiError, invalid
from jaxserve.server.generation import Generation
from jaxserve.server.service import Service

_JSON = b"application/json"
_STREAM_HEADERS = (
  (b"content-type", b"text/event-stream; charset=utf-8"),
  (b"cache-control", b"no-cache"),
  (b"x-accel-buffering", b"no"),
)
# Pages load nothing from anywhere else, and nobody may frame them.
_PAGE_HEADERS = {
  "content-security-policy": "default-src 'none'; connect-src 'self'; img-src data:; "
  "style-src 'unsafe-inline'; script-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; "
  "form-action 'none'",
  "x-content-type-options": "nosniff",
}
_SAFE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_SMALL_BODY = 1 << 16  # bytes that are decoded on the event loop
_GUARDED = ("/v1/", "/tokenize", "/detokenize", "/tokenizer_info", "/live/")
_CODES = {404: "not_found", 405: "method_not_allowed"}

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def make_app(
  service: Service, *, api_key: str | None, max_body_bytes: int, vllm_names: bool = False
) -> ASGIApp:
  """The application of a service that somebody else starts and stops.

  Args:
    service: what is served.
    api_key: what clients must send as a bearer token, if anything.
    max_body_bytes: larger bodies are refused, most of them before they are read.
    vllm_names: /metrics has vLLM's names too.
  """
  routes = _Routes(service, max_body_bytes, vllm_names)
  app = Starlette(
    routes=[Route(path, call, methods=methods.split()) for methods, path, call in routes.table()],
    exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected},
  )
  return _Outer(app, service, api_key)


class _Routes:
  """One method for each endpoint."""

  def __init__(self, service: Service, max_body_bytes: int, vllm_names: bool):
    self._service, self._served = service, service.served
    self._max_body_bytes, self._vllm_names = max_body_bytes, vllm_names

  def table(self) -> Iterable[tuple[str, str, Endpoint]]:
    """Methods, path, endpoint."""
    return (
      ("POST", "/v1/completions", self.completions),
      ("POST", "/v1/chat/completions", self.chat_completions),
      ("GET", "/v1/models", self.models),
      ("GET", "/v1/models/{name:path}", self.model),
      ("POST", "/tokenize", self.tokenize),
      ("POST", "/detokenize", self.detokenize),
      ("GET", "/tokenizer_info", self.tokenizer_info),
      ("GET", "/health", self.health),
      ("GET", "/ping", self.health),
      ("GET", "/version", self.version),
      ("GET", "/metrics", self.metrics),
      ("GET", "/openapi.json", self.openapi),
      ("GET", "/docs", self.docs),
      ("GET", "/", self.page),
      ("GET", "/live/steps", self.steps),
      ("GET POST", "/live/settings", self.settings),
    )

  async def completions(self, request: Request) -> ASGIApp:
    """POST /v1/completions."""
    body = await self._body(request, protocol.CompletionRequest)
    order = await self._aside(intake.completion_order, body, self._served)
    form = replies.TextFormat(self._header("cmpl"), order, self._served.tokenizer)
    return _Reply(self._service.open(order.jobs, order.options), order, form)

  async def chat_completions(self, request: Request) -> ASGIApp:
    """POST /v1/chat/completions."""
    body = await self._body(request, protocol.ChatRequest)
    order = await self._aside(intake.chat_order, body, self._served)
    form = replies.ChatFormat(self._header("chatcmpl"), order, self._served.tokenizer)
    try:
      return _Reply(self._service.open(order.jobs, order.options), order, form)
    except ApiError as error:
      if error.param == "prompt":
        error.param = "messages"
      raise

  async def models(self, request: Request) -> Response:
    """GET /v1/models."""
    del request
    return _json(protocol.ModelList([self._card()]))

  async def model(self, request: Request) -> Response:
    """GET /v1/models/NAME."""
    intake.check_model(request.path_params["name"], self._served)
    return _json(self._card())

  async def tokenize(self, request: Request) -> Response:
    """POST /tokenize."""
    body = await self._body(request, protocol.TokenizeRequest)
    ids = await self._aside(intake.tokenize, body, self._served)
    texts = None
    if body.return_token_strs:
      texts = [intake.special_text(token, self._served) for token in ids]
    return _json(protocol.TokenizeReply(len(ids), self._served.max_model_len, ids, texts))

  async def detokenize(self, request: Request) -> Response:
    """POST /detokenize."""
    body = await self._body(request, protocol.DetokenizeRequest)
    intake.check_model(body.model, self._served)
    size = self._served.engine.config.model.vocab_size
    for position, token in enumerate(body.tokens):
      if not 0 <= token < size:
        raise invalid("tokens", f"tokens[{position}]={token}: not in the vocabulary of {size}")
    decode = self._served.tokenizer.decode
    text = await self._aside(lambda: decode(body.tokens, skip_special_tokens=False))
    return _json(protocol.DetokenizeReply(text))

  async def tokenizer_info(self, request: Request) -> Response:
    """GET /tokenizer_info."""
    del request
    tokenizer = self._served.tokenizer
    eos = tokenizer.eos_token_ids
    info = protocol.TokenizerInfo(
      vocab_size=tokenizer.vocab_size,
      model_max_length=self._served.max_model_len,
      bos_token=intake.special_text(tokenizer.bos_token_id, self._served) or None,
      eos_token=intake.special_text(eos[0] if eos else None, self._served) or None,
      chat_template=self._served.chat_template,
    )
    return _json(info)

  async def health(self, request: Request) -> Response:
    """GET /health and /ping."""
    del request
    health = self._service.health
    return _json(health, 200 if health.status == "ok" else 503)

  async def version(self, request: Request) -> Response:
    """GET /version."""
    del request
    return _json(protocol.Version(metadata.version("jaxserve")))

  async def metrics(self, request: Request) -> Response:
    """GET /metrics."""
    del request
    text = self._service.metrics.text(self._vllm_names)
    return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

  async def openapi(self, request: Request) -> Response:
    """GET /openapi.json."""
    del request
    body = msgspec.json.encode(openapi.document(metadata.version("jaxserve"), self._bounds()))
    return Response(body, media_type="application/json")

  async def docs(self, request: Request) -> Response:
    """GET /docs."""
    del request
    return HTMLResponse(_page("docs.html"), headers=_PAGE_HEADERS)

  async def page(self, request: Request) -> Response:
    """GET /."""
    del request
    return HTMLResponse(_page("live.html"), headers=_PAGE_HEADERS)

  async def steps(self, request: Request) -> Response:
    """GET /live/steps: the last steps and every one to come, as server-sent events."""
    del request
    watch = self._service.feed.watch()
    blocks = (b"data: " + protocol.encode(records) + b"\n\n" async for records in watch)
    headers = {name.decode(): value.decode() for name, value in _STREAM_HEADERS}
    return StreamingResponse(blocks, headers=headers)

  async def settings(self, request: Request) -> Response:
    """GET /live/settings, and POST, which changes them first."""
    if request.method == "POST":
      body = await self._body(request, protocol.SettingsRequest)
      await self._service.set_budget(body.budget)
    return _json(steps.settings_of(self._served.engine))

  def _card(self) -> protocol.ModelCard:
    served = self._served
    return protocol.ModelCard(served.name, self._service.created, served.max_model_len)

  def _bounds(self) -> shapes.Bounds:
    settings, served = steps.settings_of(self._served.engine), self._served
    return shapes.Bounds(
      model=served.name,
      vocab_size=settings.vocab_size,
      room=self._service.room,
      prioritized=served.engine.config.scheduler.ordering == "priority",
      budgets=(settings.min_budget, settings.max_budget),
    )

  def _header(self, prefix: str) -> replies.Header:
    name, created = self._served.name, int(clock.wall())
    return replies.Header(id=f"{prefix}-{uuid.uuid4().hex}", created=created, model=name)

  async def _aside(self, function: Callable[..., T], *args: Any) -> T:
    """Calls a function of the text layer off the event loop."""
    self._service.check_serving()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._service.text_pool, function, *args)

  async def _body(self, request: Request, kind: type[T]) -> T:
    body = await _read(request, self._max_body_bytes)
    if len(body) <= _SMALL_BODY:
      return bodies.decode(body, kind)
    return await self._aside(bodies.decode, body, kind)


class _Reply:
  """Sends what is generated, and ends it when the client goes away."""

  def __init__(self, generation: Generation, order: intake.Order, form: replies.Format):
    self._generation, self._order, self._form = generation, order, form

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """As ASGI calls it."""
    work = asyncio.ensure_future(self._stream(send) if self._order.stream else self._whole(send))
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
      await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
      self._generation.close()
      for task in (work, gone):
        task.cancel()
      await asyncio.gather(work, gone, return_exceptions=True)
    if not work.cancelled():
      work.result()

  async def _whole(self, send: Send) -> None:
    body = await replies.whole(self._form, self._order, self._generation)
    length = str(len(body)).encode()
    await _start(send, ((b"content-type", _JSON), (b"content-length", length)))
    await send({"type": "http.response.body", "body": body})

  async def _stream(self, send: Send) -> None:
    events = replies.events(self._form, self._order, self._generation)
    block = await anext(events)  # an error before it still has a status of its own
    await _start(send, _STREAM_HEADERS)
    await send({"type": "http.response.body", "body": block, "more_body": True})
    async for block in events:
      await send({"type": "http.response.body", "body": block, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _start(send: Send, headers: Iterable[tuple[bytes, bytes]]) -> None:
  await send({"type": "http.response.start", "status": 200, "headers": list(headers)})


async def _disconnect(receive: Receive) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass


async def _read(request: Request, most: int) -> bytes:
  """The body, unless it is larger than `most` bytes: such a one is not read to its end."""
  too_large = ApiError(413, f"the body has more than {most} bytes", "body_too_large")
  announced = request.headers.get("content-length", "")
  if announced.isdecimal() and int(announced) > most:
    raise too_large
  body = bytearray()
  try:
    async for part in request.stream():
      body += part
      if len(body) > most:
        raise too_large
  except ClientDisconnect:
    raise ApiError(400, "the body is not complete", "invalid_json") from None
  return bytes(body)


class _Outer:
  """What concerns every request: its id, the key, and the count of responses."""

  def __init__(self, app: ASGIApp, service: Service, api_key: str | None):
    self._app, self._service = app, service
    self._api_key = None if api_key is None else api_key.encode()

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """As ASGI calls it."""
    if scope["type"] != "http":
      await self._app(scope, receive, send)
      return
    headers = dict(scope["headers"])
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex

    async def send_with_id(message: Message) -> None:
      if message["type"] == "http.response.start":
        message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
        self._service.metrics.response(message["status"])
      await send(message)

    if not self._allowed(scope["path"], headers.get(b"authorization", b"")):
      error = ApiError(401, "the API key is missing or wrong", "invalid_api_key")
      await _error(error)(scope, receive, send_with_id)
      return
    await self._app(scope, receive, send_with_id)

  def _allowed(self, path: str, authorization: bytes) -> bool:
    if self._api_key is None or not path.startswith(_GUARDED):
      return True
    scheme, _, key = authorization.partition(b" ")
    return hmac.compare_digest(key.strip(), self._api_key) and scheme.lower() == b"bearer"


@functools.cache
def _page(name: str) -> str:
  return resources.files("jaxserve.server").joinpath("pages", name).read_text("utf-8")


def _json(body: msgspec.Struct, status: int = 200) -> Response:
  return Response(protocol.encode(body), status, media_type="application/json")


def _error(error: ApiError) -> Response:
  body = protocol.encode(error.reply)
  return Response(body, error.status, headers=error.headers, media_type="application/json")


# Asynchronous, as Starlette runs other handlers on threads that it starts for them.
async def _api_error(request: Request, error: Exception) -> Response:
  del request
  assert isinstance(error, ApiError)
  return _error(error)


async def _http_error(request: Request, error: Exception) -> Response:
  assert isinstance(error, HTTPException)
  code = _CODES.get(error.status_code, "bad_request")
  message = f"{request.method} {request.url.path}: {error.detail}"
  response = _error(ApiError(error.status_code, message, code))
  response.headers.update(error.headers or {})
  return response


async def _unexpected(request: Request, error: Exception) -> Response:
  del request
  return _error(ApiError(500, f"the server failed: {type(error).__name__}", "internal_error"))
