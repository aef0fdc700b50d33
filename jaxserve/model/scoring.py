"""Log-probabilities of prompts: the head on the hidden states of a chunk, block by block.

`rows` is compiled for every token bucket and costs next to nothing; `score`, which reads the
head's weights, for one number of rows. So the number of executables is a sum.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.model import dots, llama, sampling
from jaxserve.types import PromptOutput
from jaxserve.types.sampling import MAX_TOP

BLOCK = 64


def rows(x: jax.Array, first: jax.Array) -> jax.Array:
  """BLOCK rows of f32[T, Dm] from `first` on; past the last row, that one again."""
  return x.at[first + jnp.arange(BLOCK)].get(mode="clip")


def score(
  leaves: tuple[jax.Array, ...],
  hidden: jax.Array,
  targets: jax.Array,
  *,
  graphdef: nnx.GraphDef,
  eps: float,
) -> PromptOutput:
  """What the head says of the tokens that follow.

  Args:
    leaves: parameters, from `llama.load`.
    hidden: f32[BLOCK, Dm], not normalised.
    targets: i32[BLOCK], for every row the token after it.
    graphdef: static, from `llama.load`.
    eps: static, of the last norm.
  """
  model = llama.merge(graphdef, leaves)
  logits = dots.linear(llama.rms_norm(hidden, model.norm[...], eps), model.head)
  log_sum = jax.nn.logsumexp(logits, axis=1)
  top, ids = sampling.top_k(logits, min(MAX_TOP, logits.shape[1]))
  mine = jnp.take_along_axis(logits, targets[:, None], axis=1)
  return PromptOutput(
    logprobs=mine[:, 0] - log_sum,
    ranks=1 + jnp.sum(logits > mine, axis=1, dtype=jnp.int32),
    top_ids=ids,
    top_logprobs=top - log_sum[:, None],
  )
