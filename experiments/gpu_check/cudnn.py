"""JAX's paged attention of cuDNN, private and not always there: decodes of equal contexts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_check import numerics, timing
from experiments.gpu_check.stages import Absent

_CALLS = 16
_MOST_LAYERS = 16
_MOST_BYTES = 1 << 30


def cases(settings, records):
  del records
  for batch, context in settings.decodes:
    yield (
      f"decode batch {batch} context {context}",
      functools.partial(check, batch, context, settings),
    )


def library():
  if jax.devices()[0].platform != "gpu":
    raise Absent("cuDNN needs a GPU")
  try:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return cudnn.paged_attention, cudnn.MaskType.PADDING
  except (ImportError, AttributeError) as error:
    raise Absent(f"jax {jax.__version__} has no cuDNN paged attention: {error}") from error


def check(batch, context, settings):
  attention, mask = library()
  shape, dtype = settings.shape, jnp.dtype(settings.shape.dtype)
  columns = context // shape.page_size
  pages = batch * columns
  layers = max(1, min(_MOST_BYTES // (batch * context * shape.kv_bytes), _MOST_LAYERS))
  keys = jax.random.split(jax.random.key(numerics.fresh_seed()), 2 * layers + 1)
  dims = (pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
  normal = jax.jit(lambda key: jax.random.normal(key, dims, dtype))
  pools = [(normal(k), normal(v)) for k, v in zip(keys[:layers], keys[layers:-1], strict=True)]
  q = jax.random.normal(keys[-1], (batch, 1, shape.num_heads, shape.head_dim), dtype)
  order = np.random.default_rng(numerics.fresh_seed()).permutation(pages).astype(np.int32)
  table = jax.device_put(order.reshape(batch, 1, columns, 1))
  ones, lengths = (jnp.full(batch, n, jnp.int32) for n in (1, context))

  @jax.jit
  def run(q, pools):
    for i in range(_CALLS):
      k, v = pools[i % layers]
      out = attention(
        q, k, v, ones, lengths, table, table, scale=shape.head_dim**-0.5, mask_type=mask
      )
      out = out[0] if isinstance(out, tuple | list) else out
      q, _ = jax.lax.optimization_barrier((q, out))
    return out

  times = timing.seconds(lambda: run(q, pools), settings)
  seconds = times["seconds"] / _CALLS
  return {
    "seconds": seconds, "low": times["low"] / _CALLS, "high": times["high"] / _CALLS,
    "batch": batch, "context": context, "layers": layers,
    "gb_per_s": batch * context * shape.kv_bytes / seconds / 1e9,
  }  # fmt: skip
