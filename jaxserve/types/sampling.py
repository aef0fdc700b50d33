"""What sampling is told, and what a step gives back to the host."""

import jax

from jaxserve.pytree import pytree_dataclass

MAX_TOP = 20  # most alternatives of a token
FEW_TOP = 8  # so many are computed whether somebody wants them or not
MAX_STOP_IDS = 64  # stop tokens that the device knows of
MAX_BIAS = 300  # tokens of a logit bias


@pytree_dataclass
class LogitEdits:
  """What changes a request's logits before its token is chosen, for every accepted request.

  V is the vocabulary; ids of V and above stand for none.

  active: bool[Q]; where False nothing of the rest is looked at.
  num_prompt: i32[Q], tokens of its prompt.
  min_length: i32[Q]; no stop token is chosen for a position below it.
  stop_ids: i32[Q, MAX_STOP_IDS]; kept whether active or not.
  presence: f32[Q], taken off tokens that the outputs have; 0 = off.
  frequency: f32[Q], taken off as often as the outputs have them; 0 = off.
  repetition: f32[Q], divides positive and multiplies negative logits of tokens that prompt or
    outputs have; 1 = off.
  bias_ids: i32[Q, MAX_BIAS].
  bias: f32[Q, MAX_BIAS], added.
  allowed: u32[Q, ceil(V / 32)]; token t may be chosen where bit t % 32 of word t // 32 is set.
  """

  active: jax.Array
  num_prompt: jax.Array
  min_length: jax.Array
  stop_ids: jax.Array
  presence: jax.Array
  frequency: jax.Array
  repetition: jax.Array
  bias_ids: jax.Array
  bias: jax.Array
  allowed: jax.Array


@pytree_dataclass
class SamplingTable:
  """Sampling options of every accepted request, on the model's device. Options are data.

  temperature: f32[Q]; 0 = greedy.
  top_k: i32[Q]; 0 = off.
  top_p: f32[Q] in [0, 1]; 1 = off, 0 = only the top token.
  min_p: f32[Q] in [0, 1]; 0 = off.
  seed: u32[Q]; the key of an output is fold_in(key(seed), its position), so a request's text does
    not depend on its neighbours.
  num_top: i32[Q], alternatives wanted with every output.
  edits: of the logits.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  seed: jax.Array
  num_top: jax.Array
  edits: LogitEdits


@pytree_dataclass
class PromptOutput:
  """What the head says of B tokens of a prompt, each given those before it.

  logprobs: f32[B], log-probability of the token.
  ranks: i32[B], 1 for the most likely one.
  top_ids: i32[B, K], the K most likely tokens.
  top_logprobs: f32[B, K], theirs, falling.
  """

  logprobs: jax.Array
  ranks: jax.Array
  top_ids: jax.Array
  top_logprobs: jax.Array


@pytree_dataclass
class StepOutput:
  """What the head computed for the first B rows of a plan; B is a row bucket.

  tokens: i32[B], the sampled token; meaningless where plan.sample_mask is False.
  logprobs: f32[B], its log-probability under the unmodified logits.
  top_ids: i32[B, K], the K most likely tokens; filled up from FEW_TOP on if no row wants more.
  top_logits: f32[B, K], their logits, falling; filled up with -inf.
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
