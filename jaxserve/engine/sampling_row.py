"""The sampling options of one request as a row of the table on the model's device."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.request import SamplingParams
from jaxserve.model.logit_edits import WORD, num_words
from jaxserve.pytree import scalar
from jaxserve.types import LogitEdits, SamplingTable
from jaxserve.types.sampling import MAX_BIAS, MAX_STOP_IDS

MAX_SEED = 2**32


def empty_sampling_table(max_requests: int, vocab_size: int) -> SamplingTable:
  """Greedy rows."""
  row = sampling_row(SamplingParams(), vocab_size)
  return jax.tree.map(lambda value: jnp.full((max_requests, *value.shape), value, value.dtype), row)


def sampling_row(
  sampling: SamplingParams,
  vocab_size: int,
  num_prompt: int = 0,
  stop_ids: Sequence[int] = (),
  constrained: bool = False,
) -> SamplingTable:
  """One row, on the host; a request without a seed gets 0.

  Args:
    sampling: at most MAX_BIAS biases.
    vocab_size: of the model.
    num_prompt: tokens of the prompt.
    stop_ids: tokens that end it; the first MAX_STOP_IDS count on the device, where min_tokens holds
      them back and a loop of decodes ends early.
    constrained: a mask for its next token comes before every step.
  """
  return SamplingTable(
    temperature=scalar(sampling.temperature, np.float32),
    top_k=scalar(max(sampling.top_k, 0), np.int32),
    top_p=scalar(sampling.top_p, np.float32),
    min_p=scalar(sampling.min_p, np.float32),
    seed=scalar((sampling.seed or 0) % MAX_SEED, np.uint32),
    num_top=scalar(sampling.num_top, np.int32),
    edits=LogitEdits(
      active=scalar(constrained or sampling.edits_logits, np.bool_),
      num_prompt=scalar(num_prompt, np.int32),
      min_length=scalar(num_prompt + sampling.min_tokens, np.int32),
      stop_ids=_padded(stop_ids[:MAX_STOP_IDS], MAX_STOP_IDS, vocab_size),
      presence=scalar(sampling.presence_penalty, np.float32),
      frequency=scalar(sampling.frequency_penalty, np.float32),
      repetition=scalar(sampling.repetition_penalty, np.float32),
      bias_ids=_padded([token for token, _ in sampling.logit_bias], MAX_BIAS, vocab_size),
      bias=_padded([bias for _, bias in sampling.logit_bias], MAX_BIAS, 0.0),
      allowed=mask_of(sampling, vocab_size),  # type: ignore[arg-type]
    ),
  )


def mask_of(sampling: SamplingParams, vocab_size: int) -> np.ndarray:
  """u32[ceil(V / 32)]: which tokens the options allow, whatever came before."""
  allowed = np.ones(num_words(vocab_size) * WORD, bool)
  if sampling.allowed_token_ids is not None:
    allowed[:] = False
    allowed[list(sampling.allowed_token_ids)] = True
  allowed[list(sampling.bad_token_ids)] = False
  return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)


def _padded(values: Sequence[float], size: int, fill: float) -> jax.Array:
  row = np.full(size, fill, np.float32 if isinstance(fill, float) else np.int32)
  row[: len(values)] = values
  return row  # type: ignore[return-value]
