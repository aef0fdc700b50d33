"""The load of the experiment: streams of short chats, and one long prompt in their midst."""

import dataclasses
from collections.abc import Callable, Sequence

# Each asks for a reply of some length, so that its stream is still decoding when others arrive.
QUESTIONS = (
  "Write a short story about a lighthouse keeper and a storm.",
  "Explain to a child why the sky is blue.",
  "Describe how bread is made, step by step.",
  "What should I see in Paris in three days?",
  "Explain the difference between weather and climate.",
  "Write a letter to a friend about a walk in the mountains.",
  "How does a bicycle stay upright?",
  "Tell me about the history of the printing press.",
  "Give me advice on learning to play the piano.",
  "Describe a busy market in the morning.",
  "What are the causes of the seasons?",
  "Explain how a library is organised.",
)
LONG_QUESTION = "\n\nWho is the main character of this text, and what does she follow?"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
  """One request of an open-loop workload: it is sent at its time whatever the server does.

  Attributes:
    id: name in reports, the same in every run.
    at_s: seconds after the run began.
    prompt: token ids.
    max_tokens: most outputs.
    is_long_prompt: the request whose effect on the others is studied.
  """

  id: str
  at_s: float
  prompt: tuple[int, ...]
  max_tokens: int
  is_long_prompt: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StallSizes:
  """Shape of the experiment; times are in units of one decoding step, measured beforehand.

  Attributes:
    streams: chats that are decoding when the long prompt arrives.
    late_streams: chats that arrive after it.
    spacing_steps: between two arrivals before the long prompt.
    late_spacing_steps: between two arrivals after it.
    max_tokens: most outputs of a chat.
    long_prompt_tokens: length of the long prompt.
    long_max_tokens: its outputs.
  """

  streams: int = 7
  late_streams: int = 3
  spacing_steps: float = 5.0
  late_spacing_steps: float = 12.0
  max_tokens: int = 96
  long_prompt_tokens: int = 3700
  long_max_tokens: int = 16

  @property
  def whole_step(self) -> int:
    """About the most tokens of an unchunked step: the long prompt, and chats beside it."""
    return self.long_prompt_tokens + self.streams + self.late_streams

  @property
  def longest(self) -> int:
    """Tokens of the long request, outputs included."""
    return self.long_prompt_tokens + self.long_max_tokens


def fitted(sizes: StallSizes, max_model_len: int, num_slots: int) -> StallSizes:
  """The sizes, with the long prompt cut to what a request may be and half of the pool."""
  room = min(max_model_len - 1, num_slots // 2) - sizes.long_max_tokens
  return dataclasses.replace(sizes, long_prompt_tokens=max(min(sizes.long_prompt_tokens, room), 1))


def stall_workload(
  encode_chat: Callable[[str], Sequence[int]],
  long_prompt: Sequence[int],
  step_s: float,
  sizes: StallSizes,
) -> tuple[Arrival, ...]:
  """Chats every few steps, the long prompt when all first ones are decoding, then a few more.

  Args:
    encode_chat: a question as token ids, in the model's chat format.
    long_prompt: token ids.
    step_s: seconds of one decoding step on this machine.
    sizes: shape of the experiment.
  """
  long_at_s = sizes.streams * sizes.spacing_steps * step_s
  times = [i * sizes.spacing_steps * step_s for i in range(sizes.streams)]
  times += [
    long_at_s + i * sizes.late_spacing_steps * step_s for i in range(1, sizes.late_streams + 1)
  ]
  chats = [
    Arrival(
      id=f"chat-{i + 1}",
      at_s=at_s,
      prompt=tuple(encode_chat(QUESTIONS[i % len(QUESTIONS)])),
      max_tokens=sizes.max_tokens,
    )
    for i, at_s in enumerate(times)
  ]
  long = Arrival(
    id="long", at_s=long_at_s, prompt=tuple(long_prompt), max_tokens=sizes.long_max_tokens,
    is_long_prompt=True,
  )  # fmt: skip
  return tuple(sorted((*chats, long), key=lambda arrival: arrival.at_s))
