"""Drafts by a smaller model: its likeliest token, k times over, one token of every row at a time.

The draft model has pages of its own under the same block tables. It computes every plan that the
large one does, so its pages hold the same positions; what it still lacks when drafts are wanted is
the newest output, with which it begins.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.config import ModelConfig, PlanShape
from jaxserve.model import dots, llama, sampling, step
from jaxserve.model.kv_cache import KVCache
from jaxserve.types import StepPlan, unpack_plan
from pallas_kernels.ragged_paged_attention import Implementation


def propose(
  leaves: tuple[jax.Array, ...],
  kv: KVCache,
  token_table: jax.Array,
  packed_plan: jax.Array,
  owner: jax.Array,
  ends: jax.Array,
  *,
  graphdef: nnx.GraphDef,
  config: ModelConfig,
  shape: PlanShape,
  dtype: jnp.dtype,
  attention: Implementation = "xla",
  unroll: bool = False,
) -> tuple[KVCache, jax.Array, jax.Array]:
  """Writes drafts behind the newest outputs.

  A row gets as many as its pages reach: they were handed out for the step before, and a request
  asks for the next page when it needs it.

  Args:
    leaves: parameters of the draft model.
    kv: its cache, donated.
    token_table: i32[Q, max_model_len], donated.
    packed_plan: of the step whose outputs are continued, in the smallest bucket's shape; only its
      rows are read.
    owner: i32[R'], from `verify`: the request of each row that has an output, else Q.
    ends: i32[R'], from `verify`.
    graphdef: static, of the draft model.
    config: static, the draft model.
    shape: static, of the plan.
    dtype: static, see `step.forward`.
    attention: static, see `step.forward`.
    unroll: static, see `step.forward`.

  Returns:
    (the cache; the token table; i32[R'] how many drafts each row has).

  Cost: k forward passes of R' tokens.
  """
  given, model = unpack_plan(packed_plan, shape), llama.merge(graphdef, leaves)
  rows, page_size = owner.shape[0], shape.cache.page_size
  tables = given.block_tables[:rows]
  reach = -(-given.seq_lens[:rows] // page_size) * page_size
  own = PlanShape(**(vars(shape) | {"num_tokens": rows, "query_tile": 1, "max_drafts": 0}))
  # The last position of the table has no successor.
  room = jnp.minimum(reach, token_table.shape[1] - 1) - (ends - 1)
  proposed = jnp.where(owner < token_table.shape[0], jnp.clip(room, 0, shape.max_drafts), 0)
  lane = jnp.arange(rows, dtype=jnp.int32)

  def one(i: jax.Array, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
    kv, token_table = carry
    live = i < proposed
    position = jnp.where(live, ends - 1 + i, 0)
    plan = _decodes(jnp.where(live, owner, token_table.shape[0]), position, live, tables, own)
    x, kv = step.run_plan(
      model, kv, token_table, plan, config=config, shape=own, dtype=dtype, attention=attention,
      unroll=unroll,
    )  # fmt: skip
    hidden = llama.rms_norm(x, model.norm[...], config.rms_norm_eps)
    _, best = sampling.top_k(dots.linear(hidden, model.head), 1)
    row = jnp.where(live, owner, token_table.shape[0] + lane)
    token_table = token_table.at[row, position + 1].set(
      best[:, 0], mode="drop", unique_indices=True
    )
    return kv, token_table

  kv, token_table = lax.fori_loop(0, shape.max_drafts, one, (kv, token_table))
  return kv, token_table, proposed


def _decodes(
  owner: jax.Array, position: jax.Array, live: jax.Array, tables: jax.Array, shape: PlanShape
) -> StepPlan:
  """The plan of one token a row; rows that are not live compute something that nobody reads."""
  rows, page_size = len(owner), shape.cache.page_size
  lane, zero = jnp.arange(rows, dtype=jnp.int32), jnp.zeros(rows, jnp.int32)
  page = jnp.take_along_axis(tables, position[:, None] // page_size, axis=1)[:, 0]
  slot = page * page_size + position % page_size
  one = jnp.ones_like(lane)
  work = jnp.stack([lane, lane, one, position, zero, position + 1, zero, one], axis=-1)
  count = jnp.int32(rows)
  return StepPlan(
    num_tokens=count,
    num_rows=count,
    row_request=owner,
    query_start_loc=jnp.arange(rows + 1, dtype=jnp.int32),
    seq_lens=position + 1,
    logits_idx=lane,
    sample_mask=one,
    block_tables=tables,
    token_rows=lane,
    positions=position,
    slot_mapping=jnp.where(live, slot, shape.cache.num_slots + lane),
    num_work=jnp.stack([count, count]),
    work=work,
  )
