"""The step plan: everything one forward pass needs to know, in fixed shapes, as one int32 array."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import PlanShape
from jaxserve.pytree import pack, pytree_dataclass, unpack

WORK_COLUMNS = 8


@pytree_dataclass
class StepPlan:
  """What one forward pass computes. Rows are scheduled requests in order of service.

  A plan names (request, position), not token values: those lie in the token table on the model's
  device, so the next step can be dispatched before this one's tokens reach the host.

  num_tokens: i32[], valid prefix of the T axis.
  num_rows: i32[], valid prefix of the R axis.
  row_request: i32[R], request of each row; padding Q.
  query_start_loc: i32[R+1], row r's tokens are [query_start_loc[r], query_start_loc[r+1]).
  seq_lens: i32[R], context of each row after this step, its new tokens included; padding 0.
  logits_idx: i32[R], index in T of each row's last token; padding 0.
  sample_mask: i32[R], 1 where the row reaches its last known token, so its sample counts. The
    sample of row r is the token at position seq_lens[r] of request row_request[r].
  block_tables: i32[R, M], page ids of each row; 0 past the pages that seq_lens needs.
  token_rows: i32[T], row of each token; padding R.
  positions: i32[T], position of each token in its request, from 0; padding 0.
  slot_mapping: i32[T], page * S + offset where its KV is written; padding, and tokens whose KV is
    in a shared page, N * S + t: distinct and out of range, for mode='drop' with
    unique_indices=True.
  num_work: i32[2], how many work items belong to decodes, which have one query and come first, and
    how many items there are. A generated token always is a decode, a prompt token never, however
    its prompt is cut: so the arithmetic of a position does not depend on the chunk it came in.
  work: i32[W, 8], attention work items (row, first query in T, number of queries, position of the
    first query, kv_start, kv_end, split, num_splits). Query i of an item has position first + i
    and sees the keys of its row at positions 0..first + i, those written by this very step
    included. An item stands for the keys in [kv_start, kv_end). Those of a decode may be split
    over num_splits consecutive items, with split = 0..num_splits - 1 and ranges in order that
    cover [0, position + 1) (see `sched.split_kv`); a chunk has one item a tile of queries, with
    kv_start 0, kv_end the position past its last query, split 0 and num_splits 1. Padding 0.
  num_drafts: i32[R], how many of the row's tokens, the last ones, are drafts; each of them and the
    token before them is a decode with items of its own. None where max_drafts is 0.
  """

  num_tokens: jax.Array
  num_rows: jax.Array
  row_request: jax.Array
  query_start_loc: jax.Array
  seq_lens: jax.Array
  logits_idx: jax.Array
  sample_mask: jax.Array
  block_tables: jax.Array
  token_rows: jax.Array
  positions: jax.Array
  slot_mapping: jax.Array
  num_work: jax.Array
  work: jax.Array
  num_drafts: jax.Array | None = None


def plan_field_shapes(shape: PlanShape) -> dict[str, tuple[int, ...]]:
  """The shape of every field of a `StepPlan`, in the order in which they are packed."""
  rows, tokens = shape.num_rows, shape.num_tokens
  fields: dict[str, tuple[int, ...]] = {
    "num_tokens": (),
    "num_rows": (),
    "row_request": (rows,),
    "query_start_loc": (rows + 1,),
    "seq_lens": (rows,),
    "logits_idx": (rows,),
    "sample_mask": (rows,),
    "block_tables": (rows, shape.pages_per_request),
    "token_rows": (tokens,),
    "positions": (tokens,),
    "slot_mapping": (tokens,),
    "num_work": (2,),
    "work": (shape.num_work_items, WORK_COLUMNS),
  }
  return fields | {"num_drafts": (rows,)} if shape.max_drafts else fields


def packed_size(shape: PlanShape) -> int:
  """Length of a packed plan, in int32 words."""
  return sum(math.prod(s) for s in plan_field_shapes(shape).values())


def pack_plan(plan: StepPlan) -> jax.Array:
  """Lays all fields end to end in one i32[packed_size] array: one copy to the device."""
  return pack(plan)


def unpack_plan(packed: jax.Array, shape: PlanShape) -> StepPlan:
  """The inverse of `pack_plan`, with static offsets: free inside a jitted step."""
  fields: dict[str, Any] = {
    name: jax.ShapeDtypeStruct(dims, jnp.int32) for name, dims in plan_field_shapes(shape).items()
  }
  return unpack(packed, StepPlan(**fields))


def cut_plan(packed: np.ndarray, parts: Sequence[slice]) -> np.ndarray:
  """A packed plan of a larger bucket as the plan of a smaller one that holds its tokens.

  Args:
    packed: on the host.
    parts: from `plan_parts`, of both shapes.

  Returns:
    A new array.

  Cost: one copy of the result.
  """
  return np.concatenate([packed[part] for part in parts])


def plan_parts(laid_out: PlanShape, shape: PlanShape) -> tuple[slice, ...]:
  """Where the fields of a plan of `shape` lie in a packed plan of a larger bucket.

  Every field of the smaller plan is a prefix of the larger one's, padding included, as long as the
  tokens fit; so few token counts need a compiled `lay_out`.

  Args:
    laid_out: shape of the larger one.
    shape: the same but for a smaller or equal num_tokens.
  """
  parts, at, wanted = [], 0, plan_field_shapes(shape)
  for name, dims in plan_field_shapes(laid_out).items():
    parts.append(slice(at, at + math.prod(wanted[name])))
    at += math.prod(dims)
  return tuple(parts)
