"""Plans of one kind of step: every row has the same number of tokens and wants all their logits."""

import numpy as np

from jaxserve.config import CacheConfig, PlanShape
from jaxserve.types import StepPlan
from jaxserve.types.plan import WORK_COLUMNS

PAGE_SIZE = 64


def plan_shape(rows: int, tokens: int, context: int) -> PlanShape:
  """For `rows` requests of `tokens` tokens a step and up to `context` in all."""
  pages = -(-context // PAGE_SIZE)
  return PlanShape(
    num_tokens=rows * tokens,
    num_rows=rows * tokens,  # So that a step gives the hidden state of every token.
    max_requests=rows,
    pages_per_request=pages,
    cache=CacheConfig(num_pages=max(rows * pages, 2), page_size=PAGE_SIZE),
    max_model_len=context,
    query_tile=tokens,
  )


def step_plan(shape: PlanShape, rows: int, start: int, count: int) -> StepPlan:
  """The step that computes positions start..start + count - 1 of `rows` requests.

  One token a step is a decode, more are a chunk; request r holds the pages from r * M on.
  """
  total, tokens = rows * count, np.arange(rows * count)
  request, position = tokens // count, start + tokens % count
  size, pages = shape.cache.page_size, shape.pages_per_request
  table = np.arange(rows)[:, None] * pages + np.arange(pages)
  first = np.arange(rows) * count
  items = [(r, r * count, count, start, 0, start + count, 0, 1) for r in range(rows)]

  def padded(values: np.ndarray, length: int, fill: int | np.ndarray = 0) -> np.ndarray:
    out = np.broadcast_to(fill, length).astype(np.int32)
    out[: len(values)] = values
    return out

  work = np.zeros((shape.num_work_items, WORK_COLUMNS), np.int32)
  work[:rows] = items
  tables = np.zeros((shape.num_rows, pages), np.int32)
  tables[:rows] = table
  slots = table[request, position // size] * size + position % size
  beyond = shape.cache.num_slots + np.arange(shape.num_tokens)
  return StepPlan(
    num_tokens=np.int32(total),
    num_rows=np.int32(rows),
    row_request=padded(np.arange(rows), shape.num_rows, shape.max_requests),
    query_start_loc=padded(first, shape.num_rows + 1, total),
    seq_lens=padded(np.full(rows, start + count), shape.num_rows),
    logits_idx=padded(tokens, shape.num_rows),
    sample_mask=padded(np.ones(rows), shape.num_rows),
    block_tables=tables,
    token_rows=padded(request, shape.num_tokens, shape.num_rows),
    positions=padded(position, shape.num_tokens),
    slot_mapping=padded(slots, shape.num_tokens, beyond),
    num_work=np.asarray([rows if count == 1 else 0, rows], np.int32),
    work=work,
  )
