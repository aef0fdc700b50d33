"""What sampling is told, and what a step gives back to the host."""

import jax

from jaxserve.pytree import pytree_dataclass


@pytree_dataclass
class SamplingTable:
  """Sampling options of every accepted request, on the model's device. Options are data.

  temperature: f32[Q]; 0 = greedy.
  top_k: i32[Q]; 0 = off.
  top_p: f32[Q] in [0, 1]; 1 = off, 0 = only the top token.
  min_p: f32[Q] in [0, 1]; 0 = off.
  seed: u32[Q]; the key of an output is fold_in(key(seed), its position), so a request's text does
    not depend on its neighbours.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  seed: jax.Array


@pytree_dataclass
class StepOutput:
  """What the head computed for the first B rows of a plan; B is a row bucket.

  tokens: i32[B], the sampled token; meaningless where plan.sample_mask is False.
  logprobs: f32[B], its log-probability under the unmodified logits.
  top_ids: i32[B, K], the K most likely tokens.
  top_logits: f32[B, K], their logits, falling.
  log_sum: f32[B], log of the sum of exp(logits): a logit minus it is a log-probability.

  With speculation a row of the plan has as many of the B places as it has drafts, and one more:
  counts: bool[B], the token is an output.
  owner: i32[R'], request of each row with an output, else Q; R' = min(B, R).
  ends: i32[R'], position behind its last output.
  proposed: i32[R'], drafts that were written there.
  """

  tokens: jax.Array
  logprobs: jax.Array
  top_ids: jax.Array
  top_logits: jax.Array
  log_sum: jax.Array
  counts: jax.Array | None = None
  owner: jax.Array | None = None
  ends: jax.Array | None = None
  proposed: jax.Array | None = None
