"""Which drafter an engine has, and what `--speculate` may say."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from jaxserve.config import ModelConfig, SchedulerConfig
from jaxserve.model.ngram import Ngram

Kind = Literal["ngram", "draft"]
USAGE = "use ngram:k=4, or draft:MODEL,k=4"
MOST_DRAFTS = 16
_NUMBERS = {"ngram": ("k", "longest", "shortest"), "draft": ("k",)}


_LONGEST_PAUSE = 6  # a power of two


@dataclasses.dataclass(kw_only=True)
class Restraint:
  """Passes over drafts of a request whose last ones were all wrong: 1, 3, 7, ... 63 times.

  Drafts that are looked up cost nothing to make, but a step that verifies them is larger, and the
  next one cannot be dispatched before it is read. One right draft ends the restraint.

  Attributes:
    wrong: verifications in a row in which no draft was right.
    pause: offers still to be passed over.
  """

  wrong: int = 0
  pause: int = 0

  def allow(self, proposed: int, drafts: int, accepted: int) -> int:
    """How many of `proposed` new drafts to verify, after `accepted` of `drafts` were right."""
    if drafts:
      self.wrong = 0 if accepted else min(self.wrong + 1, _LONGEST_PAUSE)
      self.pause = (1 << self.wrong) - 1
    if proposed and self.pause:
      self.pause -= 1
      return 0
    return proposed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculate:
  """Speculative decoding.

  Attributes:
    kind: "ngram" looks drafts up in the request's own tokens, "draft" asks a smaller model.
    k: most drafts of one request in a step.
    longest: most tokens that "ngram" looks for.
    shortest: fewest tokens that it takes for more than chance.
    model: of "draft", as `--model` takes it.
  """

  kind: Kind
  k: int = 4
  longest: int = 4
  shortest: int = 2
  model: str | None = None

  def __post_init__(self) -> None:
    if not 1 <= self.k <= MOST_DRAFTS:
      raise ValueError(f"speculate: k={self.k}: must be in [1, {MOST_DRAFTS}]")
    if (self.kind == "draft") != bool(self.model):
      raise ValueError(f"speculate: model={self.model!r} with {self.kind!r}; {USAGE}")
    try:
      Ngram(longest=self.longest, shortest=self.shortest)
    except ValueError as error:
      raise ValueError(f"speculate: {error}") from None

  @property
  def lookup(self) -> Ngram | None:
    """What "ngram" looks for; None for a model."""
    return Ngram(longest=self.longest, shortest=self.shortest) if self.kind == "ngram" else None

  def restraint(self) -> Restraint | None:
    """That of a new request; None for a model, whose drafts have been paid for."""
    return Restraint() if self.kind == "ngram" else None


def parse(text: str) -> Speculate:
  """What `--speculate` says: KIND:NAME=NUMBER,..., for "draft" with the model in front.

  Raises:
    ValueError: with the remedy.
  """
  name, _, rest = text.partition(":")
  kind = _kind(name, text)
  parts = [part for part in rest.split(",") if part]
  model = parts.pop(0) if kind == "draft" and parts else None
  numbers = dict(_number(kind, part, text) for part in parts)
  return Speculate(kind=kind, model=model, **numbers)


def _kind(name: str, text: str) -> Kind:
  if name == "ngram":
    return "ngram"
  if name == "draft":
    return "draft"
  raise ValueError(f"speculate={text!r}: {name!r} is no drafter; {USAGE}")


def _number(kind: Kind, part: str, text: str) -> tuple[str, int]:
  name, _, value = part.partition("=")
  known = _NUMBERS[kind]
  if name not in known or not value.isdecimal():
    raise ValueError(f"speculate={text!r}: {part!r} is not one of {', '.join(known)} with =NUMBER")
  return name, int(value)


def check_draft_model(
  speculate: Speculate | None, draft: ModelConfig | None, model: ModelConfig,
  scheduler: SchedulerConfig,
) -> None:  # fmt: skip
  """Refuses shapes that do not belong together.

  Raises:
    ValueError: naming the field, its value and the remedy.
  """
  drafts = speculate.k if speculate else 0
  if scheduler.max_drafts != drafts:
    raise ValueError(
      f"max_drafts={scheduler.max_drafts}: must be {drafts}, the k of speculate={speculate}"
    )
  if (draft is not None) != (speculate is not None and speculate.kind == "draft"):
    raise ValueError(f"draft_model={draft}: does not belong to speculate={speculate}")
  if draft is None:
    return
  if draft.vocab_size != model.vocab_size:
    raise ValueError(
      f"draft_model: has a vocabulary of {draft.vocab_size} tokens and the model one of "
      f"{model.vocab_size}; drafts need a smaller model of the same family"
    )
  if draft.max_position < scheduler.max_model_len:
    raise ValueError(
      f"draft_model: supports {draft.max_position} tokens, less than max_model_len="
      f"{scheduler.max_model_len}; lower max_model_len or take another model"
    )


def by_slot(values: Mapping[int, int], size: int, fill: int) -> np.ndarray:
  """i32[size] with the values of some slots."""
  array = np.full(size, fill, np.int32)
  array[list(values)] = list(values.values())
  return array
