"""Changes of one row's logits before its token is chosen: bias, penalties, what is not allowed.

A row is changed by its own request's options and tokens alone. Counts are taken from the token
table when they are needed, so nothing has to be kept, or undone when a request is preempted.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.model.sampling import RowOptions
from jaxserve.types import LogitEdits

WORD = 32  # tokens in a word of a mask


def num_words(vocab_size: int) -> int:
  """Words of a mask over the vocabulary."""
  return -(-vocab_size // WORD)


def of(edits: LogitEdits, token_table: jax.Array) -> Callable[[jax.Array, RowOptions], jax.Array]:
  """What `sampling.sample` applies to a row; i32[Q, max_model_len] has the tokens of requests."""

  def apply(logits: jax.Array, row: RowOptions) -> jax.Array:
    return edit(logits, edits, row.request, row.position, token_table[row.request])

  return apply


def edit(
  logits: jax.Array, edits: LogitEdits, request: jax.Array, position: jax.Array, tokens: jax.Array
) -> jax.Array:
  """The logits from which a row's token is chosen; the bias comes first, then the penalties.

  Args:
    logits: f32[V].
    edits: of all requests.
    request: i32[], whose row it is.
    position: i32[], that the token will have in it.
    tokens: i32[max_model_len], of the request, known below `position`.

  Returns:
    f32[V]; -inf where a token must not be chosen.

  Cost: O(max_model_len + V), for rows with edits only.
  """
  mine = jax.tree.map(lambda column: column[request], edits)
  logits = logits.at[mine.bias_ids].add(mine.bias, mode="drop")
  off = (mine.repetition == 1) & (mine.presence == 0) & (mine.frequency == 0)
  logits = lax.cond(off, lambda: logits, lambda: _penalized(logits, mine, position, tokens))
  held = logits.at[mine.stop_ids].set(-jnp.inf, mode="drop")
  logits = jnp.where(position < mine.min_length, held, logits)
  index = jnp.arange(logits.shape[0], dtype=jnp.uint32)
  bits = mine.allowed[index // WORD] >> (index % WORD)
  return jnp.where(bits & 1, logits, -jnp.inf)


def _penalized(
  logits: jax.Array, mine: LogitEdits, position: jax.Array, tokens: jax.Array
) -> jax.Array:
  vocab_size = logits.shape[0]
  index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
  is_output = (index >= mine.num_prompt) & (index < position)
  outputs = jnp.where(is_output, tokens, vocab_size)
  prompt = jnp.where(index < mine.num_prompt, tokens, vocab_size)
  counts = jnp.zeros(vocab_size, jnp.float32).at[outputs].add(1.0, mode="drop")
  seen = (counts > 0).at[prompt].set(True, mode="drop")
  shrunk = jnp.where(logits > 0, logits / mine.repetition, logits * mine.repetition)
  logits = jnp.where(seen, shrunk, logits)
  return logits - mine.frequency * counts - jnp.where(counts > 0, mine.presence, 0.0)
