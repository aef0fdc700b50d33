"""Requests and responses, as the OpenAI clients know them. Unknown fields are ignored.

The same structs validate a request, encode a response and make the OpenAPI schema. A field that is
null counts as left out; what can be left out is null here, and `intake` has the defaults and
checks the values. What the schema says of values is in `shapes`.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]
Role = str


class StreamOptions(Struct):
  """What a stream carries besides text."""

  include_usage: bool | None = None
  continuous_usage_stats: bool | None = None


class StructuredOutputs(Struct, kw_only=True):
  """What an output has to be; one of these."""

  json: dict[str, Any] | str | None = None
  regex: str | None = None
  choice: list[str] | None = None
  grammar: str | None = None
  json_object: bool | None = None


class Sampled(Struct, kw_only=True):
  """Fields that both kinds of completion share."""

  model: str | None = None
  temperature: float | None = None
  top_p: float | None = None
  top_k: int | None = None
  min_p: float | None = None
  n: int | None = None
  stop: str | list[str] | None = None
  stop_token_ids: list[int] | None = None
  include_stop_str_in_output: bool | None = None
  skip_special_tokens: bool | None = None
  ignore_eos: bool | None = None
  seed: int | None = None
  stream: bool | None = None
  stream_options: StreamOptions | None = None
  priority: int | None = None
  user: str | None = None
  request_id: str | None = None
  cache_salt: str | None = None
  min_tokens: int | None = None
  logit_bias: dict[str, float] | None = None
  presence_penalty: float | None = None
  frequency_penalty: float | None = None
  repetition_penalty: float | None = None
  allowed_token_ids: list[int] | None = None
  prompt_logprobs: int | None = None
  return_token_ids: bool | None = None
  response_format: dict[str, Any] | None = None
  structured_outputs: StructuredOutputs | None = None
  guided_json: dict[str, Any] | str | None = None
  guided_regex: str | None = None
  guided_choice: list[str] | None = None
  guided_grammar: str | None = None
  bad_words: list[str] | None = None


class CompletionRequest(Sampled, kw_only=True):
  """A text to continue."""

  prompt: str | list[str | int | list[int]]
  max_tokens: int | None = None
  logprobs: int | None = None
  echo: bool | None = None
  add_special_tokens: bool | None = None
  # Known, and refused unless they ask for nothing.
  best_of: int | None = None
  suffix: str | None = None


class TextPart(Struct):
  """A part of a message. Others than text are not served."""

  type: Literal["text"]
  text: str


class Message(Struct, omit_defaults=True):
  """One message of a conversation."""

  role: Role
  content: str | list[TextPart] | None = None
  name: str | None = None
  tool_calls: list[dict[str, Any]] | None = None
  tool_call_id: str | None = None


class ChatRequest(Sampled, kw_only=True):
  """A conversation to continue."""

  messages: list[Message]
  max_tokens: int | None = None
  max_completion_tokens: int | None = None
  logprobs: bool | None = None
  top_logprobs: int | None = None
  add_generation_prompt: bool | None = None
  chat_template_kwargs: dict[str, Any] | None = None
  tools: list[dict[str, Any]] | None = None
  tool_choice: str | dict[str, Any] | None = None
  parallel_tool_calls: bool | None = None
  # Known, and refused unless they ask for nothing.
  continue_final_message: bool | None = None
  echo: bool | None = None
  functions: list[dict[str, Any]] | None = None
  function_call: str | dict[str, Any] | None = None
  modalities: list[str] | None = None


class PromptTokensDetails(Struct):
  """Where the tokens of the prompt came from."""

  cached_tokens: int = 0


class Usage(Struct):
  """Tokens of a request."""

  prompt_tokens: int
  completion_tokens: int
  total_tokens: int
  prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Struct):
  """Log-probabilities of tokens; with `echo` those of the prompt first, of which one has none."""

  tokens: list[str]
  token_logprobs: list[float | None]
  top_logprobs: list[dict[str, float] | None]
  text_offset: list[int]


class PromptLogprob(Struct):
  """What the model said of a token at a position of the prompt. The likeliest has rank 1."""

  logprob: float
  rank: int
  decoded_token: str


# For every token of a prompt, by id: the token itself and the most likely ones.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Struct):
  """One continuation."""

  index: int
  text: str
  logprobs: CompletionLogprobs | None
  finish_reason: FinishReason | None
  stop_reason: int | str | None = None
  token_ids: list[int] | UnsetType = UNSET
  prompt_token_ids: list[int] | UnsetType = UNSET
  prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionReply(Struct, kw_only=True):
  """An answer to a CompletionRequest, or a chunk of one."""

  id: str
  created: int
  model: str
  choices: list[CompletionChoice]
  usage: Usage | None | UnsetType = UNSET
  object: Literal["text_completion"] = "text_completion"


class TopLogprob(Struct):
  """One alternative at a position."""

  token: str
  logprob: float
  bytes: list[int]


class TokenLogprob(Struct):
  """A generated token."""

  token: str
  logprob: float
  bytes: list[int]
  top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
  """Log-probabilities of generated tokens."""

  content: list[TokenLogprob]


class CalledFunction(Struct):
  """What to call; the arguments are JSON."""

  name: str
  arguments: str


class ToolCall(Struct):
  """A call that the model asks for; in a stream, complete in one chunk."""

  id: str
  function: CalledFunction
  type: Literal["function"] = "function"
  index: int | UnsetType = UNSET


class ReplyMessage(Struct):
  """What the model said."""

  content: str | None
  role: Literal["assistant"] = "assistant"
  refusal: None = None
  tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
  """One reply."""

  index: int
  message: ReplyMessage
  logprobs: ChatLogprobs | None
  finish_reason: FinishReason
  stop_reason: int | str | None = None
  token_ids: list[int] | UnsetType = UNSET


class ChatReply(Struct, kw_only=True):
  """An answer to a ChatRequest."""

  id: str
  created: int
  model: str
  choices: list[ChatChoice]
  usage: Usage
  prompt_token_ids: list[int] | UnsetType = UNSET
  prompt_logprobs: PromptLogprobs | UnsetType = UNSET
  object: Literal["chat.completion"] = "chat.completion"


class Delta(Struct, omit_defaults=True):
  """What a chunk adds to a reply."""

  role: Literal["assistant"] | None = None
  content: str | None = None
  tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(Struct):
  """What a chunk adds to one reply."""

  index: int
  delta: Delta
  logprobs: ChatLogprobs | None
  finish_reason: FinishReason | None
  stop_reason: int | str | None = None
  token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
  """A piece of a streamed answer to a ChatRequest."""

  id: str
  created: int
  model: str
  choices: list[ChatChunkChoice]
  usage: Usage | None | UnsetType = UNSET
  prompt_token_ids: list[int] | UnsetType = UNSET
  object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelCard(Struct):
  """A model that is served."""

  id: str
  created: int
  max_model_len: int
  object: Literal["model"] = "model"
  owned_by: str = "jaxserve"


class ModelList(Struct):
  """All models that are served."""

  data: list[ModelCard]
  object: Literal["list"] = "list"


class TokenizeRequest(Struct, kw_only=True):
  """A text or a conversation to tokenize."""

  model: str | None = None
  prompt: str | None = None
  messages: list[Message] | None = None
  add_special_tokens: bool | None = None
  add_generation_prompt: bool | None = None
  chat_template_kwargs: dict[str, Any] | None = None
  return_token_strs: bool | None = None


class TokenizeReply(Struct):
  """Token ids."""

  count: int
  max_model_len: int
  tokens: list[int]
  token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True):
  """Token ids to make text of."""

  tokens: list[int]
  model: str | None = None


class DetokenizeReply(Struct):
  """Their text."""

  prompt: str


class TokenizerInfo(Struct):
  """What a client needs to know of the tokenizer."""

  vocab_size: int
  model_max_length: int
  bos_token: str | None
  eos_token: str | None
  chat_template: str | None
  tokenizer_class: str = "PreTrainedTokenizerFast"


class Version(Struct):
  """Of the server."""

  version: str


class Health(Struct):
  """Whether requests are served, and if not, why."""

  status: Literal["ok", "loading", "draining", "dead"]
  reason: str | None = None


class Settings(Struct):
  """What the live page shows and changes."""

  budget: int
  min_budget: int
  max_budget: int
  max_model_len: int
  num_pages: int
  vocab_size: int


class SettingsRequest(Struct):
  """A change of settings; it holds from the next step on."""

  budget: int


class StepRecord(Struct):
  """One step: `bucket` tokens were computed, of which `decode` + `prefill` were wanted.

  `ms` is how long it ran, `gap_ms` the longest time that a stream had waited for the token it got.
  `requests` are who it computed for, the first of them: number, tokens, and 1 for a prompt's.
  """

  step: int
  at_s: float
  budget: int
  bucket: int
  decode: int
  prefill: int
  ms: float
  gap_ms: float
  running: int
  waiting: int
  pages: int
  requests: list[tuple[int, int, int]]


class ErrorInfo(Struct):
  """What went wrong."""

  message: str
  type: str
  param: str | None
  code: str


class ErrorReply(Struct):
  """The body of every response that is not a success."""

  error: ErrorInfo


encode = msgspec.json.Encoder().encode
