"""Step plans written out by hand, for tests of the model that do not need the scheduler."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxserve.config import PlanShape
from jaxserve.types import StepPlan
from jaxserve.types.plan import WORK_COLUMNS


@dataclasses.dataclass(frozen=True)
class Row:
  """One row: `tokens` computed in this step after `context` earlier ones, KV in `pages`."""

  tokens: int
  context: int
  pages: Sequence[int]
  request: int = 0
  decode: bool | None = None  # None: if it has one token
  sample: bool = True


def work_items(
  rows: Sequence[Row], query_tile: int, chunk_keys: int | None = None
) -> tuple[list[tuple[int, ...]], int]:
  """Attention work of the rows, items of one query first, and how many those are.

  With `chunk_keys`, items of one query are split into so many keys each.
  """
  single, many, start = [], [], 0
  for r, row in enumerate(rows):
    for at in range(0, row.tokens, query_tile):
      count = min(query_tile, row.tokens - at)
      item = (r, start + at, count, row.context + at)
      keys = row.context + at + count
      decode = row.tokens == 1 if row.decode is None else row.decode
      if not decode:
        many.append((*item, 0, keys, 0, 1))
        continue
      bounds = [*range(0, keys, chunk_keys or keys), keys]
      for split, (begin, end) in enumerate(itertools.pairwise(bounds)):
        single.append((*item, begin, end, split, len(bounds) - 1))
    start += row.tokens
  return single + many, len(single)


def make_plan(rows: Sequence[Row], shape: PlanShape) -> StepPlan:
  """The plan that computes `rows`, as numpy int32 arrays."""
  size, num_rows = shape.cache.page_size, shape.num_rows
  total = sum(row.tokens for row in rows)
  assert total <= shape.num_tokens and len(rows) <= num_rows
  row_request = np.full(num_rows, shape.max_requests, np.int32)
  starts = np.full(num_rows + 1, total, np.int32)
  seq_lens, logits_idx, mask = (np.zeros(num_rows, np.int32) for _ in range(3))
  tables = np.zeros((num_rows, shape.pages_per_request), np.int32)
  token_rows = np.full(shape.num_tokens, num_rows, np.int32)
  positions = np.zeros(shape.num_tokens, np.int32)
  slots = (shape.cache.num_slots + np.arange(shape.num_tokens)).astype(np.int32)
  at = 0
  for r, row in enumerate(rows):
    here = slice(at, at + row.tokens)
    where = row.context + np.arange(row.tokens)
    pages = np.asarray(row.pages, np.int32)
    row_request[r], starts[r], mask[r] = row.request, at, row.sample
    seq_lens[r], logits_idx[r] = row.context + row.tokens, at + row.tokens - 1
    tables[r, : len(pages)] = pages
    token_rows[here], positions[here] = r, where
    slots[here] = pages[where // size] * size + where % size
    at += row.tokens
  items, num_single = work_items(rows, shape.query_tile)
  work = np.zeros((shape.num_work_items, WORK_COLUMNS), np.int32)
  if items:
    work[: len(items)] = items
  return StepPlan(
    num_tokens=np.int32(total), num_rows=np.int32(len(rows)), row_request=row_request,
    query_start_loc=starts, seq_lens=seq_lens, logits_idx=logits_idx, sample_mask=mask,
    block_tables=tables, token_rows=token_rows, positions=positions, slot_mapping=slots,
    num_work=np.asarray([num_single, len(items)], np.int32), work=work,
  )  # fmt: skip
