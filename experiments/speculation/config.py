"""The engine, the texts, and the cases that are compared."""

import dataclasses
import pathlib

from jaxserve.engine import SamplingParams, startup
from jaxserve.engine.speculation import Speculate
from jaxserve.text.chat import render_chat

PASSAGE = (
  "The lighthouse keeper wrote the weather into a grey ledger every evening. On the third of May "
  "he noted wind from the north-west, a falling glass, and two fishing boats that had not come "
  "home. At nine he lit the lamp. At ten the first boat passed the pier with a torn sail. The "
  "second boat, the Margaret, was found next morning on the sand below the mill, empty and "
  "unharmed, with her nets neatly folded and a lantern still burning in the cabin."
)
QUOTE = (
  "Repeat the following text word for word, and write nothing else:\n\n" + PASSAGE,
  "Correct the spelling of this text and give all of it back:\n\n" + PASSAGE,
)
CHAT = (
  "Explain in a few paragraphs how a steam engine turns heat into motion.",
  "Write a short story about a clockmaker who is always late.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A load under which an engine with drafts is held against one without.

  Attributes:
    name: of the text.
    rows: requests at once.
    temperature: of sampling.
  """

  name: str
  rows: int
  temperature: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is measured.

  Attributes:
    model: as `--model` takes it.
    dtype: of weights, products and KV.
    speculate: the drafter.
    outputs: tokens of every request.
    rounds: each runs every case on both engines.
    cache_dir: as for jaxserve.main.
    cases: loads.
  """

  model: str = "smollm2-135m"
  dtype: str = "bfloat16"
  speculate: Speculate = Speculate(kind="ngram", k=4)
  outputs: int = 96
  rounds: int = 5
  cache_dir: str = "~/.cache/jaxserve"
  cases: tuple[Case, ...] = (
    Case(name="quote", rows=1),
    Case(name="quote", rows=8),
    Case(name="chat", rows=1),
    Case(name="chat", rows=8),
    Case(name="random", rows=1, temperature=1.0),
    Case(name="random", rows=8, temperature=1.0),
  )


def start(config, speculate):
  """An engine with or without drafts."""
  options = startup.StartOptions(
    model=config.model,
    cache_dir=pathlib.Path(config.cache_dir).expanduser(),
    dtype=config.dtype,
    budget=512,
    max_num_seqs=8,
    max_model_len=1024,
    kv_cache_tokens=8192,
    speculate=speculate,
  )
  return startup.start(options)


def prompts(case, tokenizer, template, vocab, rng):
  """One prompt a row."""
  if case.name == "random":
    return [rng.integers(0, vocab, 256).tolist() for _ in range(case.rows)]
  questions = QUOTE if case.name == "quote" else CHAT
  chats = [render_chat(template, [{"role": "user", "content": text}]) for text in questions]
  encoded = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
  return [encoded[row % len(encoded)] for row in range(case.rows)]


def sampling(case, config, row):
  """The options of a row."""
  return SamplingParams(
    max_tokens=config.outputs, temperature=case.temperature, seed=row, ignore_eos=True
  )
