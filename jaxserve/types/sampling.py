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
  """

  tokens: jax.Array
  logprobs: jax.Array
  top_ids: jax.Array
  top_logits: jax.Array
  log_sum: jax.Array
