"""The two pure functions that the engine compiles: `forward` per token bucket, `sample` per rows.

`forward` hands on the few row fields that `sample` needs, so `sample` does not depend on the token
bucket: the number of executables is a sum, not a product.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.config import ModelConfig, PlanShape
from jaxserve.model import dots, kv_cache, llama, logit_edits, sampling, verify
from jaxserve.model.kv_cache import KVCache
from jaxserve.types import SamplingTable, StepOutput, StepPlan, unpack_plan
from pallas_kernels.ragged_paged_attention import Implementation, ragged_paged_attention

# Rows of the array that `forward` hands to `sample`.
ROW_REQUEST, SEQ_LENS, SAMPLE_MASK = range(3)


def compiler_options(backend: str) -> dict[str, bool | int | str]:
  """What to pass to `jax.jit(..., compiler_options=...)` on `backend` ("cpu", "gpu", "tpu")."""
  # Full-width vectors: 1.1 to 1.7 times on elementwise loops, which attention is made of.
  return {"xla_cpu_prefer_vector_width": 512} if backend == "cpu" else {}


def forward(
  leaves: tuple[jax.Array, ...],
  kv: KVCache,
  token_table: jax.Array,
  packed_plan: jax.Array,
  *,
  graphdef: nnx.GraphDef,
  config: ModelConfig,
  shape: PlanShape,
  dtype: jnp.dtype,
  attention: Implementation = "xla",
  unroll: bool = False,
) -> tuple[jax.Array, KVCache, jax.Array, jax.Array]:
  """Runs the model over the tokens of one plan.

  Args:
    leaves: parameters, from `llama.load`.
    kv: donated; updated in place.
    token_table: i32[Q, max_model_len], tokens of every request by position.
    packed_plan: i32[packed_size(shape)].
    graphdef: static, from `llama.load`.
    config: static, the model.
    shape: static, of the plan.
    dtype: static, of the matrices and of what the cache stores.
    attention: static, implementation of attention.
    unroll: static, see `llama.run_layers`.

  Returns:
    (f32[R, Dm] normalised hidden state of each row's last token, garbage past the plan's rows;
    the updated cache; i32[3, R] row_request, seq_lens and sample_mask, for `sample`;
    f32[T, Dm] hidden state of every token, not normalised, for `scoring`). With drafts the first
    and the third are of the places of `verify.places`.
  """
  plan = unpack_plan(packed_plan, shape)
  model = llama.merge(graphdef, leaves)
  x, kv = run_plan(
    model, kv, token_table, plan, config=config, shape=shape, dtype=dtype, attention=attention,
    unroll=unroll,
  )  # fmt: skip
  index, fields = verify.places(plan, shape) if shape.max_drafts else (plan.logits_idx, None)
  hidden = llama.rms_norm(x[index], model.norm[...], config.rms_norm_eps)
  if fields is None:
    fields = jnp.stack([plan.row_request, plan.seq_lens, plan.sample_mask])
  return hidden, kv, fields, x


def run_plan(
  model: llama.Llama,
  kv: KVCache,
  token_table: jax.Array,
  plan: StepPlan,
  *,
  config: ModelConfig,
  shape: PlanShape,
  dtype: jnp.dtype,
  attention: Implementation,
  unroll: bool,
) -> tuple[jax.Array, KVCache]:
  """The layers over the tokens of a plan; see `forward`.

  Returns:
    (f32[T, Dm] residual stream, not yet normalised; the updated cache).
  """
  x = _embed(model.embed[...], _tokens(token_table, plan))
  if config.embed_scale != 1:
    x = x * np.float32(config.embed_scale)

  def attend(
    layer: jax.Array | int, q: jax.Array, k: jax.Array, v: jax.Array, kv: KVCache,
    window: int | None,
  ) -> tuple[jax.Array, KVCache]:  # fmt: skip
    kv = kv_cache.write(
      kv, k, v, layer=layer, slot_mapping=plan.slot_mapping, dtype=dtype, implementation=attention
    )
    (k_pages, v_pages), (k_scales, v_scales) = kv.pages(), kv.scales()
    out = ragged_paged_attention(
      q,
      k_pages,
      v_pages,
      block_tables=plan.block_tables,
      work=plan.work,
      num_work=plan.num_work,
      query_tile=shape.query_tile,
      decode_items=shape.num_decode_items,
      first_page=layer * shape.cache.num_pages,
      window=window,
      implementation=attention,
      k_scales=k_scales,
      v_scales=v_scales,
    )
    return out, kv

  # Jitted it is traced and lowered once for all layers: GPU kernels take seconds of both.
  once: llama.Attend = jax.jit(attend, static_argnums=5) if unroll else attend
  return llama.run_layers(model, config, x, plan.positions, kv, once, unroll=unroll)


def sample(
  leaves: tuple[jax.Array, ...],
  hidden: jax.Array,
  token_table: jax.Array,
  sampling_table: SamplingTable,
  row_fields: jax.Array,
  *,
  graphdef: nnx.GraphDef,
  rows: int,
) -> tuple[jax.Array, StepOutput]:
  """Computes logits and draws the next token of the first `rows` rows.

  Args:
    leaves: parameters, from `llama.load`.
    hidden: f32[R, Dm], from `forward`.
    token_table: i32[Q, max_model_len], donated.
    sampling_table: options of all requests.
    row_fields: i32[3, R], from `forward`.
    graphdef: static, from `llama.load`.
    rows: static, B; at least the plan's number of rows.

  Returns:
    (token_table with the token of row r at [row_request[r], seq_lens[r]] where sample_mask[r];
    what was computed for the first B rows).
  """
  model = llama.merge(graphdef, leaves)
  requests, positions, mask = row_fields[:, :rows]
  logits = dots.linear(hidden[:rows], model.head)

  options = sampling.row_options(sampling_table, requests, positions)
  output = sampling.sample(logits, options, logit_edits.of(sampling_table.edits, token_table))
  # Rows without a sample get distinct requests out of range, and are dropped.
  targets = jnp.where(mask > 0, requests, token_table.shape[0] + jnp.arange(rows))
  token_table = token_table.at[targets, positions].set(
    output.tokens, mode="drop", unique_indices=True
  )
  return token_table, output


def _tokens(token_table: jax.Array, plan: StepPlan) -> jax.Array:
  """i32[T], token ids of the plan; 0 for padding."""
  requests = plan.row_request.at[plan.token_rows].get(mode="fill", fill_value=token_table.shape[0])
  return token_table.at[requests, plan.positions].get(mode="fill", fill_value=0)


def _embed(embed: jax.Array, tokens: jax.Array) -> jax.Array:
  """f32[T, Dm], rows of the embedding."""
  return embed.at[tokens].get(mode="clip").astype(jnp.float32)
