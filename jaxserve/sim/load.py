"""What one step has to compute, and how long that takes."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve import cost
from jaxserve.cost_profile import Profile, StepWork
from jaxserve.pytree import pytree_dataclass

_LOW_BITS = 10


@pytree_dataclass
class StepLoad:
  """The work of one step, by request slot; what a `StepTime` looks at.

  tokens: i32[Q], computed for each request; 0 = not in the step.
  prefix: i32[Q], tokens of it computed before.
  decodes: bool[Q], the request computes one generated token, not a chunk of its prompt.
  samples: bool[Q], the step yields an output token of it.
  bucket: i32[], tokens of the step with padding; their sum if there are no buckets.
  """

  tokens: jax.Array
  prefix: jax.Array
  decodes: jax.Array
  samples: jax.Array
  bucket: jax.Array

  @property
  def num_tokens(self) -> jax.Array:
    """i32[]: tokens, padding left out."""
    return jnp.sum(self.tokens, dtype=jnp.int32)

  @property
  def num_decodes(self) -> jax.Array:
    """i32[]: decode rows."""
    return jnp.sum(self.decodes, dtype=jnp.int32)

  @property
  def resident(self) -> jax.Array:
    """i32[]: tokens cached by all decode rows together."""
    return jnp.sum(jnp.where(self.decodes, self.prefix, 0), dtype=jnp.int32)

  @property
  def attended(self) -> jax.Array:
    """f32[]: the sum over chunks of c * (prefix + c/2), keys that the prompt tokens see.

    Summed as integers, so that it is the same however it is compiled.
    """
    chunk = jnp.where(self.decodes, 0, self.tokens)
    parts = [chunk * (self.prefix >> _LOW_BITS), chunk * (self.prefix & (2**_LOW_BITS - 1))]
    sums = jnp.sum(jnp.stack([*parts, chunk * chunk]), axis=-1, dtype=jnp.int32)
    high, low, square = sums.astype(jnp.float32)
    return high * 2**_LOW_BITS + low + 0.5 * square


StepTime = Callable[[StepLoad], jax.Array]
"""Seconds of a step, f32[]: traceable, pure, never negative. Same object: nothing is recompiled."""


@functools.cache
def roofline(
  model: cost.ModelCost, hardware: cost.Hardware, *, overhead_s: float = 0.0
) -> StepTime:  # fmt: skip
  """Step time by the arithmetic of `jaxserve.cost`.

  max(2*P*T/pi, P*b/beta) + 4*L*h*d*sum_chunks c*(prefix + c/2)/pi + resident*k/beta + overhead,
  T the bucket. For one chunk without padding it is `cost.chunk_seconds`, for decodes alone
  `cost.decode_seconds`.

  Args:
    model: what is served.
    hardware: on what.
    overhead_s: seconds that every step takes besides, such as launches.
  """
  weights = cost.weight_bytes(model) / hardware.bandwidth

  def step_time(load: StepLoad) -> jax.Array:
    gemm = cost.gemm_flops(model, load.bucket) / hardware.flops
    per_key = 4.0 * model.num_layers * model.num_heads * model.head_dim / hardware.flops
    attention = per_key * load.attended
    return (
      jnp.maximum(gemm, weights) + attention + cost.kv_seconds(model, hardware, load.resident)
      + overhead_s
    )  # fmt: skip

  return step_time


@functools.cache
def per_token(seconds: float, overhead_s: float = 0.0) -> StepTime:
  """A step time that is linear in tokens, for tests and lessons: overhead + tokens * seconds."""
  return lambda load: overhead_s + seconds * load.num_tokens.astype(jnp.float32)


@functools.cache
def profiled(profile: Profile) -> StepTime:
  """Step time by the costs that were measured for one engine on one machine.

  Padding counts: simulate with the engine's token buckets. Rows of the head are padded to the
  profile's; more rows than it has count as they are.
  """

  def step_time(load: StepLoad) -> jax.Array:
    sizes = jnp.asarray(profile.row_buckets, jnp.int32)
    count = jnp.sum(load.tokens > 0, dtype=jnp.int32)
    padded = jnp.min(jnp.where(sizes >= count, sizes, jnp.iinfo(jnp.int32).max))
    padded = jnp.where(count > sizes[-1], count, padded)
    real = lambda x: x.astype(jnp.float32)
    work = StepWork(
      bucket=real(load.bucket), pairs=load.attended, resident=real(load.resident),
      decodes=real(load.num_decodes),
      head_rows=real(jnp.where(jnp.any(load.samples), padded, 0)),
    )  # fmt: skip
    return jnp.asarray(profile.costs.seconds(work), jnp.float32)

  return step_time
