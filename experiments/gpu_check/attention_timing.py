"""Times the attention operation as the engine calls it, over pages of several layers in turn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_check import batches, numerics, timing
from pallas_kernels import ragged_paged_attention

CALLS = 16  # of the operation in one executable
_SLAB = 512  # pages filled at once
_MOST_LAYERS = 32


@functools.cache
def pools(shape, tokens):
  """Random K and V of so many tokens, [N, S, Hkv, D], filled slab by slab."""
  pages = -(-tokens // shape.page_size // _SLAB) * _SLAB
  dims = (pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
  dtype = jnp.dtype(shape.dtype)

  def filled(key):
    def step(i, pool):
      slab = jax.random.normal(jax.random.fold_in(key, i), (_SLAB, *dims[1:]), dtype)
      return jax.lax.dynamic_update_slice_in_dim(pool, slab, i * _SLAB, 0)

    return jax.lax.fori_loop(0, pages // _SLAB, step, jnp.zeros(dims, dtype))

  seeds = np.random.SeedSequence().generate_state(2)
  return tuple(jax.jit(filled)(jax.random.key(int(seed))) for seed in seeds)


def time_rows(rows, settings, *, num_tokens, longest, num_rows):
  """Seconds of one call over a batch of rows, by `timing.seconds`.

  Every row has pages of its own, in random order; one call after another reads other pages, of
  `layers` layers in turn, so that no cache serves them.

  Args:
    rows: of `batches.Row`.
    settings: of the run.
    num_tokens: the bucket.
    longest: most tokens of a row, the same for cases that are to share an executable.
    num_rows: to pad the batch to.
  """
  shape = settings.shape
  counts = [-(-(row.tokens + row.context) // shape.page_size) for row in rows]
  needed = sum(counts)
  k, v = pools(shape, settings.pool_tokens)
  layers = min(k.shape[0] // needed, _MOST_LAYERS)
  if not layers:
    raise MemoryError(f"{needed} pages are needed and the pool has {k.shape[0]}")
  rng = np.random.default_rng(numerics.fresh_seed())
  tables = np.split(rng.permutation(needed), np.cumsum(counts)[:-1])
  splits = batches.splits_of(jax.devices()[0], shape.num_kv_heads)
  plan = batches.plan(
    rows, tables, num_tokens=num_tokens, page_size=shape.page_size, num_pages=k.shape[0],
    longest=longest, splits=splits, num_rows=num_rows,
  )  # fmt: skip
  heads = (num_tokens, shape.num_heads, shape.head_dim)
  q = jax.random.normal(jax.random.key(numerics.fresh_seed()), heads, jnp.dtype(shape.dtype))
  numbers = np.int32(layers), np.int32(needed)
  arguments = jax.device_put((plan.block_tables, plan.work, plan.num_work, *numbers))
  call = _executable(settings, plan.shape.query_tile, plan.shape.num_decode_items)
  run = lambda: call(q, k, v, *arguments)
  out = run()
  if not bool(jnp.isfinite(out.astype(jnp.float32)).all()):
    raise FloatingPointError("the result is not finite")
  times = timing.seconds(run, settings)
  return {
    **{name: times[name] / CALLS for name in ("seconds", "low", "high")},
    "calls": times["calls"] * CALLS, "layers": layers, "items": int(plan.num_work[1]),
    "implementation": implementation(settings),
  }  # fmt: skip


def implementation(settings):
  return "xla" if settings.interpret else "mosaic_gpu"


@functools.cache
def _jitted(name, query_tile, decode_items):
  attention = functools.partial(
    ragged_paged_attention.ragged_paged_attention, query_tile=query_tile,
    decode_items=decode_items, implementation=name,
  )  # fmt: skip

  def run(q, k, v, block_tables, work, num_work, layers, stride):
    def step(i, _):
      first = (i % layers) * stride
      return attention(
        q, k, v, block_tables=block_tables, work=work, num_work=num_work, first_page=first
      )

    # A constant trip count: the host need not ask the device whether to go on.
    return jax.lax.fori_loop(0, CALLS, step, jnp.zeros_like(q))

  return jax.jit(run)


def _executable(settings, query_tile, decode_items):
  return _jitted(implementation(settings), query_tile, decode_items)
