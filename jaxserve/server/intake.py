"""From a request as it came to jobs for the engine; everything that is wrong with it is a 400."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.engine import SamplingParams, clock
from jaxserve.engine.request import check_token_ids
from jaxserve.server import structure
from jaxserve.server.errors import ApiError, conflicting, invalid, of_value_error, unsupported
from jaxserve.server.generation import TextOptions
from jaxserve.server.protocol import (
  ChatRequest,
  CompletionRequest,
  Message,
  Sampled,
  TokenizeRequest,
)
from jaxserve.server.service import Job, Served
from jaxserve.server.shapes import (
  INT32_MAX,
  MAX_N,
  MAX_STOP_CHARS,
  MAX_STOPS,
  MAX_TEMPERATURE,
  TEMPLATE_NAMES,
)
from jaxserve.server.tools import tools_of
from jaxserve.text.chat import render_chat
from jaxserve.types.sampling import MAX_TOP

_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_COMPLETION_TOKENS = 16  # OpenAI's default for completions; chats go on to their end

# Field -> the values that ask for nothing, besides null. Everything else is refused.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
  "suffix": ("",),
  "continue_final_message": (False,),
  "functions": ([],),
  "function_call": ("none", "auto"),
  "modalities": (["text"], []),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
  """A request, understood.

  Attributes:
    jobs: one for each sequence: n for the first prompt, n for the second, ...
    options: how their tokens become text.
    num_prompt: tokens of all prompts, each counted once.
    echoes: for each sequence, the text in front of it.
    stream: send it piece by piece.
    include_usage: a stream ends with the usage.
    continuous_usage: every chunk has it.
    echo_scores: log-probabilities of the prompt come before those of the outputs.
    prompt_logprobs: log-probabilities of the prompt have a field of their own.
    return_ids: token ids are part of the answer.
  """

  jobs: tuple[Job, ...]
  options: TextOptions
  num_prompt: int
  echoes: tuple[str, ...]
  stream: bool
  include_usage: bool
  continuous_usage: bool
  echo_scores: bool = False
  prompt_logprobs: bool = False
  return_ids: bool = False


def completion_order(request: CompletionRequest, served: Served) -> Order:
  """Checks and tokenizes; takes as long as that takes.

  Raises:
    ApiError: the request cannot be served.
  """
  _check_common(request, served)
  n = _num_choices(request)
  if request.best_of not in (None, n):
    raise conflicting("best_of", f"best_of: only best_of=n={n} is served, not {request.best_of}")
  prompts = _prompts(request, served)
  max_tokens = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
  scores = [request.prompt_logprobs] if request.prompt_logprobs is not None else []
  if request.echo and request.logprobs is not None:
    scores.append(request.logprobs)
  nothing = max_tokens == 0 and (bool(request.echo) or bool(scores))
  if max_tokens == 0 and not nothing:
    raise conflicting("max_tokens", "max_tokens=0: only with echo or prompt_logprobs")
  options = _text_options(request, request.logprobs, nothing)
  sampling = _sampling(
    request, 1 if nothing else max_tokens, served, options, max(scores, default=None)
  )
  _check_ids(prompts, served)  # before they are decoded
  decode = served.tokenizer.decode
  texts = [decode(prompt, skip_special_tokens=False) if request.echo else "" for prompt in prompts]
  order = _order(request, prompts, sampling, options, n, texts, served)
  return dataclasses.replace(order, echo_scores=bool(request.echo) and options.num_top is not None)


def chat_order(request: ChatRequest, served: Served) -> Order:
  """Checks, renders and tokenizes; takes as long as that takes.

  Raises:
    ApiError: the request cannot be served.
  """
  _check_common(request, served)
  if request.echo:
    raise unsupported("echo", "not for chats")
  n = _num_choices(request)
  num_top = None
  if request.logprobs:
    num_top = request.top_logprobs or 0
  elif request.top_logprobs:
    raise conflicting("top_logprobs", "top_logprobs: needs logprobs=true")
  add = request.add_generation_prompt is not False
  tools = tools_of(request, served.chat_template)
  prompt = chat_prompt(request.messages, served, add, request.chat_template_kwargs, tools)
  given = request.max_completion_tokens
  given = request.max_tokens if given is None else given
  field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
  options = _text_options(request, num_top)
  if tools is not None:
    one = request.parallel_tool_calls is False
    options = dataclasses.replace(options, tools=True, one_call=one)
  sampling = _sampling(request, given, served, options, request.prompt_logprobs, field)
  return _order(request, [prompt], sampling, options, n, [""], served)


def tokenize(request: TokenizeRequest, served: Served) -> list[int]:
  """The ids of a text or of a conversation."""
  check_model(request.model, served)
  if (request.prompt is None) == (request.messages is None):
    raise invalid("prompt", "give either prompt or messages")
  if request.messages is not None:
    add = request.add_generation_prompt is not False
    return chat_prompt(request.messages, served, add, request.chat_template_kwargs)
  special = request.add_special_tokens is not False
  return served.tokenizer.encode(request.prompt or "", add_special_tokens=special)


def check_model(model: str | None, served: Served) -> None:
  """Raises the 404 for a model that is not the one served."""
  if model is not None and model != served.name:
    raise ApiError(
      404, f"the model {model!r} does not exist; {served.name!r} is served", "model_not_found",
      "model",
    )  # fmt: skip


def special_text(token_id: int | None, served: Served) -> str:
  """How a special token is spelled; '' for none."""
  if token_id is None:
    return ""
  return served.tokenizer.decode([token_id], skip_special_tokens=False)


def chat_prompt(
  messages: Sequence[Message],
  served: Served,
  add_generation_prompt: bool,
  kwargs: Mapping[str, Any] | None,
  tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
  """The ids of a conversation, as the model's template renders it."""
  if not messages:
    raise invalid("messages", "messages: is empty; send at least one message")
  if taken := TEMPLATE_NAMES & set(kwargs or ()):
    name = min(taken)
    raise invalid("chat_template_kwargs", f"chat_template_kwargs: {name!r} has its own field")
  eos = served.tokenizer.eos_token_ids
  try:
    text = render_chat(
      served.chat_template,
      [_plain(message) for message in messages],
      add_generation_prompt=add_generation_prompt,
      bos_token=special_text(served.tokenizer.bos_token_id, served),
      eos_token=special_text(eos[0] if eos else None, served),
      now=clock.local_now(),
      **({"tools": tools} if tools else {}),
      **(kwargs or {}),
    )
  except ValueError as error:
    raise ApiError(400, f"messages: {error}", "template_error", "messages") from None
  return served.tokenizer.encode(text, add_special_tokens=False)


def _plain(message: Message) -> dict[str, Any]:
  content = message.content
  if content is None and not message.tool_calls:
    raise invalid("messages", "messages: a message has no content")
  if isinstance(content, list):
    content = "".join(part.text for part in content)
  plain = {"role": message.role, "content": content or ""}
  for name in ("name", "tool_calls", "tool_call_id"):
    value = getattr(message, name)
    if value is not None:
      plain[name] = value
  return plain


def _check_common(request: Sampled, served: Served) -> None:
  check_model(request.model, served)
  for field, harmless in _HARMLESS.items():
    value = getattr(request, field, None)
    if value is not None and value not in harmless:
      raise unsupported(field, f"{value!r} is not served")
  if request.stream_options is not None and not request.stream:
    raise conflicting("stream_options", "stream_options: only with stream=true")
  if request.prompt_logprobs is not None and request.stream:
    message = "prompt_logprobs: not with stream=true; use echo and logprobs"
    raise conflicting("prompt_logprobs", message)
  if request.priority is not None and abs(request.priority) > INT32_MAX:
    raise invalid("priority", f"priority={request.priority}: must fit 32 bits")


def _num_choices(request: Sampled) -> int:
  n = 1 if request.n is None else request.n
  if not 1 <= n <= MAX_N:
    raise invalid("n", f"n={n}: must be in [1, {MAX_N}]")
  return n


def _prompts(request: CompletionRequest, served: Served) -> list[list[int]]:
  """One list of ids for each prompt, whichever of the four forms they came in."""
  prompt = request.prompt
  given = [prompt] if isinstance(prompt, str) else prompt
  if not given:
    raise invalid("prompt", "prompt: is empty; send at least one token")
  kinds = {type(part) for part in given}
  if len(kinds) > 1:
    raise invalid("prompt", "prompt: mixes texts, tokens and lists of tokens")
  if kinds == {int}:
    return [given]  # type: ignore[list-item]
  special = request.add_special_tokens is not False
  encode = served.tokenizer.encode
  prompts = []
  for part in given:
    ids = encode(part, add_special_tokens=special) if isinstance(part, str) else part
    if not ids:
      raise invalid("prompt", "prompt: is empty; send at least one token")
    prompts.append(ids)
  return prompts  # type: ignore[return-value]


def _check_ids(prompts: Sequence[Sequence[int]], served: Served) -> None:
  try:
    for prompt in prompts:
      check_token_ids(prompt, served.engine.config.model.vocab_size)
  except ValueError as error:
    raise of_value_error(error) from None


def _sampling(
  request: Sampled,
  max_tokens: int | None,
  served: Served,
  options: TextOptions,
  prompt_logprobs: int | None,
  field: str = "max_tokens",
) -> SamplingParams:
  vocab_size = served.engine.config.model.vocab_size
  if max_tokens is not None and max_tokens < 1:
    raise invalid(field, f"{field}={max_tokens}: must be at least 1")
  temperature = 1.0 if request.temperature is None else request.temperature
  if not 0 <= temperature <= MAX_TEMPERATURE:
    raise invalid("temperature", f"temperature={temperature}: must be in [0, {MAX_TEMPERATURE}]")
  try:
    for name in ("stop_token_ids", "allowed_token_ids"):
      check_token_ids(getattr(request, name) or (), vocab_size, name)
    return SamplingParams(
      max_tokens=max_tokens,
      temperature=temperature,
      top_p=1.0 if request.top_p is None else request.top_p,
      top_k=min(request.top_k or 0, vocab_size),
      min_p=request.min_p or 0.0,
      seed=request.seed,
      stop_token_ids=tuple(request.stop_token_ids or ()),
      ignore_eos=bool(request.ignore_eos),
      min_tokens=min(request.min_tokens or 0, served.max_model_len),
      presence_penalty=request.presence_penalty or 0.0,
      frequency_penalty=request.frequency_penalty or 0.0,
      repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
      logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
      allowed_token_ids=None
      if request.allowed_token_ids is None
      else tuple(request.allowed_token_ids),
      num_top=options.num_top or 0,
      prompt_logprobs=prompt_logprobs,
      cache_salt=request.cache_salt,
    )
  except ValueError as error:
    raise of_value_error(error) from None


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
  pairs = {}
  for token, bias in given.items():
    if not _NUMBER.fullmatch(token) or int(token) >= vocab_size:
      raise ValueError(
        f"logit_bias={token!r}: must have token ids as keys; the vocabulary has [0, {vocab_size})"
      )
    pairs[int(token)] = bias
  return tuple(pairs.items())


def _text_options(request: Sampled, num_top: int | None, nothing: bool = False) -> TextOptions:
  stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
  if "" in stops:
    raise invalid("stop", "stop: an empty text stops nothing; leave it out")
  if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
    raise invalid("stop", f"stop: at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters")
  if num_top is not None and not 0 <= num_top <= MAX_TOP:
    field = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    raise invalid(field, f"{field}={num_top}: must be in [0, {MAX_TOP}]")
  return TextOptions(
    stops=stops,
    include_stop=bool(request.include_stop_str_in_output),
    skip_special_tokens=request.skip_special_tokens is not False,
    num_top=num_top,
    no_outputs=nothing,
  )


def _order(
  request: Sampled,
  prompts: Sequence[Sequence[int]],
  sampling: SamplingParams,
  options: TextOptions,
  n: int,
  echoes: Sequence[str],
  served: Served,
) -> Order:
  jobs = []
  sampling, first = structure.applied(request, sampling, served)
  for prompt in prompts:
    for index in range(n):
      seed = None if sampling.seed is None else sampling.seed + index
      own = dataclasses.replace(sampling, seed=seed)
      copy = None if first is None else first.copy()
      jobs.append(
        Job(prompt=tuple(prompt), sampling=own, priority=request.priority or 0, constraint=copy)
      )
  stream_options = request.stream_options
  continuous = bool(stream_options and stream_options.continuous_usage_stats)
  return Order(
    jobs=tuple(jobs),
    options=options,
    num_prompt=sum(map(len, prompts)),
    echoes=tuple(text for text in echoes for _ in range(n)),
    stream=bool(request.stream),
    include_usage=bool(stream_options and stream_options.include_usage),
    continuous_usage=continuous,
    prompt_logprobs=request.prompt_logprobs is not None,
    return_ids=bool(request.return_token_ids),
  )
