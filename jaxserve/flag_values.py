"""Texts and sets of flags: whether they make sense, and as values. Imports nothing."""

from collections.abc import Mapping, Sequence
from typing import Any


def is_number(text: str) -> bool:
  """Whether `float` takes it."""
  try:
    float(text)
  except ValueError:
    return False
  return True


def are_pairs(pairs: Sequence[str]) -> bool:
  """Whether all are key=value with a number."""
  return all(is_number(pair.partition("=")[2]) for pair in pairs)


def numbers(pairs: Sequence[str]) -> dict[str, float]:
  """The values of key=value by key."""
  return {key: float(value) for key, _, value in (pair.partition("=") for pair in pairs)}


def are_counts(texts: Sequence[str] | None) -> bool:
  """Whether all are whole numbers of at least 1."""
  return all(text.isdecimal() and int(text) for text in texts or ())


def holds_whole_prompts(flags: Mapping[str, Any]) -> bool:
  """Whether a step can hold a whole prompt, where prompts are not chunked."""
  budget, length = flags["budget"], flags["max_model_len"]
  return flags["chunked_prefill"] or not budget or not length or budget >= length


def caps_within_length(flags: Mapping[str, Any]) -> bool:
  """Whether the threshold for long prompts is no more than the longest."""
  length = flags["max_model_len"]
  return not length or flags["long_prefill_token_threshold"] <= length
