"""The reference case: 32 streams at 2,048 tokens of context, and a prompt of 32,768 tokens."""

import dataclasses

from experiments.served import Server

LENGTH = 34_816


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """One long prompt among streams that decode.

  Attributes:
    server: what serves; it must hold everything at once.
    budgets: token budgets of the chunked runs.
    decoders: streams.
    context: tokens that a stream has cached, on average, when the prompt arrives.
    prompt: tokens of the long prompt.
    arrives_s: when it arrives; the streams' own prompts must be done by then.
    outputs: of each stream, enough to outlast the prompt.
    long_outputs: of the long prompt.
  """

  server: Server = Server(seats=33, length=LENGTH, kv_tokens=131_072)
  budgets: tuple[int, ...] = (512, 768, 1024, 1536, 2048, 4096, 8192)
  decoders: int = 32
  context: int = 2048
  prompt: int = 32_768
  arrives_s: float = 3.0
  outputs: int = 700
  long_outputs: int = 32
