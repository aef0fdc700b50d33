"""Every kernel on fresh random batches, against attention written out in float64."""

import dataclasses
import functools
import importlib
import math

import jax
import numpy as np

from experiments.gpu_check import batches
from experiments.gpu_check.stages import Absent, Failed
from pallas_kernels import compat

# Of the norm of the error: rounding of the probabilities and of the result to the dtype.
LIMITS = {"bfloat16": 1e-2, "float16": 2e-3}
_RUNS = 3  # of the same call: results that differ are a race
_PADDING = 3  # tokens of a write that have no slot


def cases(settings, records):
  del records
  for case in settings.numerics:
    yield f"attention {case.key}", functools.partial(check_attention, case, settings)
  for write in settings.writes:
    tokens, heads, dim = write
    name = f"kv_write T={tokens} Hkv={heads} D={dim}"
    yield name, functools.partial(check_write, *write, settings)


def kernels(name, settings):
  """The entry point of an operation's GPU kernels: (function, further arguments)."""
  module = importlib.import_module(f"pallas_kernels.{name}.mosaic_gpu")
  if not settings.interpret:
    return getattr(module, name), {}
  if not compat.HAS_INTERPRETER:
    raise Absent(f"no interpreter of GPU kernels in jax {jax.__version__}: 0.11 or newer has one")
  return getattr(module, name), {"interpret": compat.interpreter(detect_races=False)}


def check_attention(case, settings):
  splits = batches.splits_of(jax.devices()[0], case.kv_heads)
  if settings.interpret:  # which walks through empty blocks, too
    splits = dataclasses.replace(splits, capacity=2)
  batch = batches.Poisoned(case, splits, fresh_seed())
  attention, more = kernels("ragged_paged_attention", settings)
  plan = batch.plan
  call = jax.jit(
    functools.partial(
      attention, query_tile=plan.shape.query_tile, decode_items=plan.shape.num_decode_items,
      **case.options, **more,
    )
  )  # fmt: skip
  k, v = batch.pools()
  arguments = jax.device_put((batch.q, plan.block_tables, plan.work, plan.num_work))
  q, tables, work, num_work = arguments
  run = lambda: np.asarray(call(q, k, v, block_tables=tables, work=work, num_work=num_work))
  outs = [run() for _ in range(1 if settings.interpret else _RUNS)]
  return judge(batch, outs, batch.expected(), LIMITS[case.dtype])


def judge(batch, outs, expected, limit):
  """Errors by kernel; raises `Failed` where one is too large, or runs differ."""
  values = {"limit": limit, "equal_runs": all(same_bits(outs[0], out) for out in outs[1:])}
  used = np.zeros(len(expected), bool)
  for name, queries in batch.parts().items():
    used[queries] = True
    if len(queries):
      values[f"{name}_error"] = relative_error(outs[0][queries], expected[queries])
  values["others_are_zero"] = not np.asarray(outs[0][~used], float).any()
  errors = {k: v for k, v in values.items() if k.endswith("_error")}
  bad = [f"{name} {error:.2g}" for name, error in errors.items() if not error <= limit]
  if bad:
    raise Failed(f"error above {limit:g}: {', '.join(bad)}", **_finite(values))
  if not values["equal_runs"]:
    raise Failed("the same call gave different bits: a race", **values)
  if not values["others_are_zero"]:
    raise Failed("rows that no item names are not zero", **values)
  return values


def _finite(values):
  """NaN is no JSON."""
  text = lambda x: isinstance(x, float) and not math.isfinite(x)
  return {k: str(x) if text(x) else x for k, x in values.items()}


def relative_error(out, expected):
  """|out - expected| / |expected|, NaN if anything is."""
  out, expected = np.asarray(out, float), np.asarray(expected, float)
  return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def same_bits(a, b):
  return a.tobytes() == b.tobytes()


def check_write(tokens, heads, dim, settings):
  rng = np.random.default_rng(fresh_seed())
  size, pages, layers, layer = 16, max(2 * tokens // 16, 3), 3, 1
  slots_of_layer = size * pages
  slots = rng.permutation(slots_of_layer)[:tokens].astype(np.int32)
  padded = rng.permutation(tokens)[: min(_PADDING, tokens - 1)]
  slots[padded] = slots_of_layer + padded
  dtype = batches._numpy_dtype("bfloat16")
  array = lambda *shape: rng.standard_normal(shape).astype(dtype)
  pools = [array(layers * pages, size, heads, dim) for _ in range(2)]
  values = [array(tokens, heads, dim) for _ in range(2)]
  write, more = kernels("kv_write", settings)
  call = jax.jit(functools.partial(write, num_slots=slots_of_layer, **more), donate_argnums=(0, 1))
  first = layer * slots_of_layer
  found = call(*map(jax.device_put, (*pools, *values)), slot_mapping=slots, first_slot=first)
  real = slots < slots_of_layer
  wrong = 0
  for pool, value, got in zip(pools, values, found, strict=True):
    expected = pool.reshape(-1, heads, dim).copy()
    expected[first + slots[real]] = value[real]
    wrong += int((np.asarray(got).reshape(expected.shape).view(np.uint16)
                  != expected.view(np.uint16)).any(axis=(1, 2)).sum())  # fmt: skip
  if wrong:
    raise Failed(f"{wrong} slots are wrong", wrong_slots=wrong)
  return {"wrong_slots": 0}


def fresh_seed():
  """Another one for every run: a fast kernel must be right on any input."""
  return int(np.random.SeedSequence().entropy % 2**32)
