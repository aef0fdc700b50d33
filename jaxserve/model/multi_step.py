"""Several steps of decodes in one executable, without the host between them."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.config import ModelConfig, PlanShape
from jaxserve.model import step
from jaxserve.model.kv_cache import KVCache
from jaxserve.types import SamplingTable, StepOutput, StepPlan, unpack_plan
from pallas_kernels.ragged_paged_attention import Implementation


def decode_steps(
  leaves: tuple[jax.Array, ...],
  kv: KVCache,
  token_table: jax.Array,
  sampling_table: SamplingTable,
  packed_plans: jax.Array,
  count: jax.Array,
  *,
  graphdef: nnx.GraphDef,
  config: ModelConfig,
  shape: PlanShape,
  dtype: jnp.dtype,
  rows: int,
  attention: Implementation = "xla",
  unroll: bool = False,
) -> tuple[KVCache, jax.Array, StepOutput, jax.Array]:
  """`step.forward` and `step.sample` for plan after plan, until all rows of the next have stopped.

  Args:
    leaves: parameters, from `llama.load`.
    kv: donated; updated in place.
    token_table: i32[Q, max_model_len], donated.
    sampling_table: options of all requests; its stop_ids tell who stops.
    packed_plans: i32[K, packed_size(shape)].
    count: i32[], plans that count, the first ones.
    graphdef: static, from `llama.load`.
    config: static, the model.
    shape: static, of the plans.
    dtype: static, as in `step.forward`.
    rows: static, B; at least the rows of every plan.
    attention: static, implementation of attention.
    unroll: static, see `llama.run_layers`.

  Returns:
    (the updated cache; the token table with all outputs; outputs with a leading axis K; how many
    plans were run i32[]: what follows them is for requests that have stopped, and is zero).

  Source: multi-step scheduling (vLLM v0.6) with the loop on the device.
  """

  def run(kv: KVCache, tokens: jax.Array, plan: jax.Array) -> tuple:
    hidden, kv, fields, _ = step.forward(
      leaves, kv, tokens, plan, graphdef=graphdef, config=config, shape=shape, dtype=dtype,
      attention=attention, unroll=unroll,
    )  # fmt: skip
    tokens, output = step.sample(
      leaves, hidden, tokens, sampling_table, fields, graphdef=graphdef, rows=rows
    )
    return kv, tokens, output, fields[step.ROW_REQUEST, :rows]

  def go_on(carry: tuple) -> jax.Array:
    number, _, _, stopped, _ = carry
    plan = unpack_plan(packed_plans[number], shape)
    gone = stopped.at[plan.row_request].get(mode="fill", fill_value=True)
    return (number < count) & ~jnp.all(gone)

  def body(carry: tuple) -> tuple:
    number, kv, tokens, stopped, outputs = carry
    kv, tokens, output, requests = run(kv, tokens, packed_plans[number])
    stopped = stopped.at[requests].max(_stops(sampling_table, output, requests), mode="drop")
    outputs = jax.tree.map(lambda every, one: every.at[number].set(one), outputs, output)
    return number + 1, kv, tokens, stopped, outputs

  one = jax.eval_shape(run, kv, token_table, packed_plans[0])[2]
  outputs = jax.tree.map(lambda x: jnp.zeros((len(packed_plans), *x.shape), x.dtype), one)
  first = unpack_plan(packed_plans[0], shape)
  stopped = _have_stopped(sampling_table, token_table, first, 2 * len(packed_plans))
  carry = jnp.int32(0), kv, token_table, stopped, outputs
  number, kv, token_table, _, outputs = lax.while_loop(go_on, body, carry)
  return kv, token_table, outputs, number


def _have_stopped(
  table: SamplingTable, token_table: jax.Array, plan: StepPlan, last: int
) -> jax.Array:
  """bool[Q]: requests of `plan` with a stop token among their last outputs, seen by no host yet."""
  requests, edits = plan.row_request, table.edits
  positions = plan.seq_lens[:, None] - 1 - jnp.arange(last)[None]
  tokens = token_table.at[requests[:, None], positions].get(mode="fill", fill_value=-1)
  first = edits.num_prompt.at[requests].get(mode="fill", fill_value=0)
  tokens = jnp.where(positions >= first[:, None], tokens, -1)
  ids = edits.stop_ids.at[requests].get(mode="fill", fill_value=-2)
  ends = jnp.any(tokens[:, :, None] == ids[:, None, :], axis=(1, 2))
  return jnp.zeros(token_table.shape[0], bool).at[requests].max(ends, mode="drop")


def _stops(table: SamplingTable, output: StepOutput, requests: jax.Array) -> jax.Array:
  """bool[B]: the token ends its request, as far as the table tells; one that is no number does."""
  ids = table.edits.stop_ids.at[requests].get(mode="fill", fill_value=-1)
  return jnp.any(ids == output.tokens[:, None], axis=1) | jnp.isnan(output.logprobs)
