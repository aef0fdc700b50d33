"""Errors as the OpenAI clients read them: {"error": {message, type, param, code}}."""

import re

import msgspec

from jaxserve.server.protocol import ErrorInfo, ErrorReply

_TYPES = {
  401: "authentication_error",
  404: "not_found_error",
  429: "rate_limit_error",
  500: "server_error",
  503: "service_unavailable_error",
  504: "timeout_error",
}
_RETRY_AFTER_S = {429: "1", 503: "5"}
_FIELD = re.compile(r"(\w+)(?:\[\d+\])*[=:]")
_PATH = re.compile(r"at `\$\.(\w+)")
_MISSING = re.compile(r"missing required field `(\w+)`")


class ApiError(Exception):
  """What a client is told instead of an answer."""

  def __init__(self, status: int, message: str, code: str, param: str | None = None):
    super().__init__(message)
    self.status, self.message, self.code, self.param = status, message, code, param

  @property
  def reply(self) -> ErrorReply:
    """The body."""
    kind = _TYPES.get(self.status, "invalid_request_error")
    return ErrorReply(
      error=ErrorInfo(message=self.message, type=kind, param=self.param, code=self.code)
    )

  @property
  def headers(self) -> dict[str, str]:
    """When to come again, where that makes sense."""
    after = _RETRY_AFTER_S.get(self.status)
    return {} if after is None else {"retry-after": after}


def invalid(param: str | None, message: str) -> ApiError:
  """A request whose field `param` cannot be served."""
  return ApiError(400, message, "invalid_value", param)


def conflicting(param: str, message: str) -> ApiError:
  """Fields that are right by themselves and not together; `param` is one of them."""
  return ApiError(400, message, "conflicting_fields", param)


def unsupported(param: str, why: str) -> ApiError:
  """A field of the OpenAI interface that this server does not have."""
  return ApiError(400, f"{param}: {why}", "unsupported_parameter", param)


def of_value_error(error: ValueError) -> ApiError:
  """A refusal of the engine or the text layer, whose message begins with the field's name."""
  match = _FIELD.match(str(error))
  return invalid(match[1] if match else None, str(error))


def of_refusal(error: ValueError) -> ApiError:
  """The engine's refusal of a request whose fields are all right by themselves."""
  refused = of_value_error(error)
  match refused.param:
    case "prompt":
      refused.code = "context_length_exceeded"
    case "bad_token_ids":
      message = refused.message.replace("bad_token_ids", "bad_words", 1)
      return conflicting("bad_words", message)
    case "min_tokens" | "allowed_token_ids":
      refused.code = "conflicting_fields"
  return refused


def of_decode_error(error: msgspec.DecodeError | RecursionError | UnicodeDecodeError) -> ApiError:
  """A body that is not what the endpoint takes."""
  if isinstance(error, RecursionError):
    return ApiError(400, "the JSON is nested too deeply", "invalid_json")
  text = str(error)
  if not isinstance(error, msgspec.ValidationError):
    return ApiError(400, f"the body is not valid JSON: {text}", "invalid_json")
  match = _MISSING.search(text) if "at `$" not in text else None
  match = match or _PATH.search(text)
  return invalid(match[1] if match else None, text)
