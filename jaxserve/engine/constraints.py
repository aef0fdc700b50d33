"""Masks of the requests whose next token somebody else decides about, before a step of theirs."""

from collections.abc import Sequence

import numpy as np

from jaxserve.engine.executables import ExecutableTable
from jaxserve.engine.request import Request, Scheduled
from jaxserve.types import SamplingTable


def apply(
  table: ExecutableTable,
  sampling: SamplingTable,
  rows: Sequence[tuple[Request, Scheduled]],
  num_rows: int,
) -> SamplingTable:
  """Writes the masks that a step needs, if it needs any.

  Args:
    table: has the program `allow`.
    sampling: donated then.
    rows: of the step.
    num_rows: R; what is left of it gets distinct slots out of range.
  """
  asked = [(r.slot, r.constraint) for r, part in rows if part.samples and r.constraint is not None]
  if not asked:
    return sampling
  num_slots, num_words = sampling.edits.allowed.shape
  slots = num_slots + np.arange(num_rows, dtype=np.int32)
  words = np.zeros((num_rows, num_words), np.uint32)
  for row, (slot, constraint) in enumerate(asked):
    slots[row], words[row] = slot, constraint.mask()
  return table["allow",](sampling, slots, words)
