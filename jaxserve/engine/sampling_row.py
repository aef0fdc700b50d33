"""The sampling options of one request as a row of the table on the model's device."""

import jax.numpy as jnp
import numpy as np

from jaxserve.engine.request import SamplingParams
from jaxserve.pytree import scalar
from jaxserve.types import SamplingTable

MAX_SEED = 2**32


def empty_sampling_table(max_requests: int) -> SamplingTable:
  """Greedy rows."""
  return SamplingTable(
    temperature=jnp.zeros(max_requests, jnp.float32),
    top_k=jnp.zeros(max_requests, jnp.int32),
    top_p=jnp.ones(max_requests, jnp.float32),
    min_p=jnp.zeros(max_requests, jnp.float32),
    seed=jnp.zeros(max_requests, jnp.uint32),
  )


def sampling_row(sampling: SamplingParams) -> SamplingTable:
  """Scalars, on the host; a request without a seed gets 0."""
  return SamplingTable(
    temperature=scalar(sampling.temperature, np.float32),
    top_k=scalar(max(sampling.top_k, 0), np.int32),
    top_p=scalar(sampling.top_p, np.float32),
    min_p=scalar(sampling.min_p, np.float32),
    seed=scalar((sampling.seed or 0) % MAX_SEED, np.uint32),
  )
