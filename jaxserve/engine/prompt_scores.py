"""Scores of prompts, chunk by chunk: dispatched behind a step, gathered when it is read."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.engine.executables import ExecutableTable
from jaxserve.engine.request import Request, Scheduled
from jaxserve.model.scoring import BLOCK
from jaxserve.types import PromptOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """Scores of `count` tokens of a prompt, from its token `first` on, perhaps still computed."""

  request: Request
  first: int
  count: int
  output: PromptOutput


def dispatch(
  table: ExecutableTable,
  leaves: tuple[jax.Array, ...],
  hidden: jax.Array,
  bucket: int,
  rows: Sequence[tuple[Request, Scheduled]],
  device: jax.Device,
) -> tuple[Part, ...]:
  """Scores what a step computes of prompts whose requests want that.

  Args:
    table: with the executables of `programs.scoring_programs`.
    leaves: parameters.
    hidden: f32[T, Dm] of the step.
    bucket: T.
    rows: of the step, in order.
    device: the model's.
  """
  parts, offset = [], 0
  for request, part in rows:
    wanted = request.sampling.prompt_logprobs is not None
    for at, first, targets in _blocks(request, part) if wanted else ():
      block = table["score_rows", bucket](hidden, np.int32(offset + at))
      padded = np.zeros(BLOCK, np.int32)
      padded[: len(targets)] = targets
      output = table["score",](leaves, block, jax.device_put(padded, device))
      for array in jax.tree.leaves(output):
        array.copy_to_host_async()
      parts.append(Part(request=request, first=first, count=len(targets), output=output))
    offset += part.tokens
  return tuple(parts)


def _blocks(request: Request, part: Scheduled) -> Iterator[tuple[int, int, Sequence[int]]]:
  """Of a row: offsets in its chunk, the first token each block scores, and those tokens."""
  end = min(part.start + part.tokens, len(request.prompt) - 1)
  for at in range(part.start, end, BLOCK):
    yield at - part.start, at + 1, request.prompt[at + 1 : min(at + BLOCK, end) + 1]


def gather(parts: Sequence[Part]) -> None:
  """Appends scores to their requests; what a replay after a preemption repeats is left out."""
  for part in parts:
    have = 1 + sum(len(scores.ranks) for scores in part.request.prompt_scores)
    skip = have - part.first
    if skip < part.count:
      assert skip >= 0, "chunks of a prompt come in order"
      cut = jax.tree.map(lambda x, p=part, s=skip: np.asarray(x)[s : p.count], part.output)
      part.request.prompt_scores.append(cut)


def joined(request: Request) -> PromptOutput | None:
  """A prompt's scores with the alternatives it asked for, once; None if it asked for none."""
  wanted = request.sampling.prompt_logprobs
  if wanted is None:
    return None
  scores, request.prompt_scores = request.prompt_scores, []
  if not scores:  # a prompt of one token
    scores = [_none()]
  whole = jax.tree.map(lambda *parts: np.concatenate(parts), *scores)
  return dataclasses.replace(
    whole, top_ids=whole.top_ids[:, :wanted], top_logprobs=whole.top_logprobs[:, :wanted]
  )


def _none() -> PromptOutput:
  numbers, ids = np.zeros(0, np.float32), np.zeros(0, np.int32)
  columns: Any = (numbers, ids, ids.reshape(0, 0), numbers.reshape(0, 0))
  return PromptOutput(
    logprobs=columns[0], ranks=columns[1], top_ids=columns[2], top_logprobs=columns[3]
  )
