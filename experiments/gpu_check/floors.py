"""The two floors of a case, the time that is predicted and the target; formulas, no device.

Decode: bytes are K and V of every key once. Chunk: FLOPs are those of causal attention.
"""

import dataclasses
import math

from experiments.gpu_check import config

TILE_ROWS = 64  # of a decode's tile, of which the heads of a group fill a few
QUERIES, KEYS = 128, 128  # of a chunk's tile
DECODE_TARGET = 0.8  # of the copy bandwidth, at batch >= 32 and context >= 4,096
CHUNK_TARGET = 550e12  # FLOP/s, of chunks >= 2,048
LAUNCH = 3e-6  # seconds of a kernel launch; assumed
KERNELS = 3  # chunk, decode, merge: all are launched for every batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
  """What a device does at best.

  Attributes:
    name: of the device, and where the figures come from.
    copy: bytes read and written a second.
    flops: FLOP/s of a bfloat16 product.
    sms: multiprocessors.
  """

  name: str
  copy: float
  flops: float
  sms: int = 132


H200 = Ceilings(name="H200, 4.3 TB/s copied and 790 TFLOP/s multiplied", copy=4.3e12, flops=790e12)
H200_SPEC = Ceilings(name="H200, data sheet", copy=4.8e12, flops=989e12)


def decode_bytes(shape, batch, context):
  """K and V of every key, queries and results."""
  return batch * (context * shape.kv_bytes + 2 * 2 * shape.num_heads * shape.head_dim)


def decode_flops(shape, batch, context):
  """Both products of every query and key."""
  return 4 * shape.num_heads * shape.head_dim * batch * context


def decode_tile_flops(shape, batch, context):
  """What the tensor cores execute: tiles of 64 rows, whatever is in them."""
  return 4 * TILE_ROWS * shape.num_kv_heads * shape.head_dim * batch * context


def chunk_flops(shape, tokens, prefix):
  """Both products of every visible pair."""
  return 4 * shape.num_heads * shape.head_dim * tokens * (prefix + (tokens + 1) / 2)


def chunk_bytes(shape, tokens, prefix):
  """K and V once, queries and results once; what the L2 cache does not hold comes on top."""
  return (prefix + tokens) * shape.kv_bytes + 2 * 2 * tokens * shape.num_heads * shape.head_dim


def decode_items(batch, context, splits):
  """Work items of equal decodes, by the engine's planner."""
  import jax.numpy as jnp

  from jaxserve.sched import split_kv

  keys = jnp.full(batch, context, jnp.int32)
  return int(split_kv.count_items(keys, split_kv.chunk_keys(keys, splits, context)).sum())


def occupied(blocks, sms):
  """Share of the multiprocessors' time that equal blocks fill, one block on each at a time."""
  return blocks / (math.ceil(blocks / sms) * sms)


@dataclasses.dataclass(frozen=True)
class Floors:
  """Seconds: `bytes` and `flops` are floors; `predicted` a guess; `target` None where none is."""

  bytes: float
  flops: float
  predicted: float
  target: float | None


def decode(shape, batch, context, ceilings, items):
  """Floors of one call over a batch of equal decodes; `items` from `decode_items`.

  Predicted: the target's share of the copy bandwidth while the device is occupied, as little as it
  is; then the float32 partial results written and read by the merge; and the launches.
  """
  read = decode_bytes(shape, batch, context) / ceilings.copy
  multiply = decode_flops(shape, batch, context) / ceilings.flops
  partial = items * shape.num_kv_heads * 8 * (shape.head_dim + 1) * 4
  busy = max(read / DECODE_TARGET, decode_tile_flops(shape, batch, context) / ceilings.flops)
  filled = occupied(items * shape.num_kv_heads, ceilings.sms)
  predicted = busy / filled + 2 * partial / ceilings.copy + KERNELS * LAUNCH
  target = read / DECODE_TARGET if batch >= 32 and context >= 4096 else None
  return Floors(read, multiply, predicted, target)


def chunk(shape, tokens, prefix, ceilings):
  """Floors of one call over one chunk.

  Predicted: whole tiles, masked halves included, at the target's rate while the device is occupied,
  but no faster than the bytes; and the launches.
  """
  read = chunk_bytes(shape, tokens, prefix) / ceilings.copy
  multiply = chunk_flops(shape, tokens, prefix) / ceilings.flops
  blocks = math.ceil(tokens / QUERIES) * shape.num_heads
  tiles = sum(
    math.ceil((prefix + min(at + QUERIES, tokens)) / KEYS) for at in range(0, tokens, QUERIES)
  )
  executed = 4 * QUERIES * KEYS * shape.head_dim * shape.num_heads * tiles
  busy = executed / min(CHUNK_TARGET, ceilings.flops) / occupied(blocks, ceilings.sms)
  predicted = max(busy, read) + KERNELS * LAUNCH
  target = chunk_flops(shape, tokens, prefix) / CHUNK_TARGET if tokens >= 2048 else None
  return Floors(read, multiply, predicted, target)


def fusion(shape, hidden, inner, tokens, prefixes, ceilings):
  """What a layer would save if RoPE and the KV write were one kernel, and what it takes.

  Unfused, rotated k and v are written once, in bfloat16, and read once more by the kernel that
  writes them to their pages.

  Args:
    shape: of attention.
    hidden: width of the residual stream.
    inner: width of the SwiGLU.
    tokens: of the step.
    prefixes: tokens cached before, of every row.
    ceilings: of the device.

  Returns:
    {"saved", "weights", "kv"} in bytes, and {"saved_s", "layer_s"}: the floor of the layer.
  """
  kv, heads = (n * shape.head_dim for n in (shape.num_kv_heads, shape.num_heads))
  saved = 2 * 2 * 2 * tokens * kv
  weights = 2 * (hidden * (2 * heads + 2 * kv) + 3 * hidden * inner)
  resident, chunk_tokens = sum(prefixes) + tokens, tokens // len(prefixes)
  pairs = sum(chunk_flops(shape, chunk_tokens, p) for p in prefixes)
  products = max(weights / ceilings.copy, weights * tokens / ceilings.flops)
  attention = max(resident * shape.kv_bytes / ceilings.copy, pairs / ceilings.flops)
  return {
    "saved": saved, "weights": weights, "kv": resident * shape.kv_bytes,
    "saved_s": saved / ceilings.copy, "layer_s": products + attention,
  }  # fmt: skip


def markdown(settings=config.FULL):
  """The tables of `experiments/kernel_notes.md`."""
  tables = _decode_table, _chunk_table, _filling_table, _fusion_table
  return "\n\n".join(table(settings) for table in tables)


def _row(*cells):
  return "| " + " | ".join(map(str, cells)) + " |"


def _us(seconds):
  return "-" if seconds is None else f"{1e6 * seconds:,.1f}"


def _decode_table(settings):
  from jaxserve.config import SplitKV, TargetDescription

  shape = settings.shape
  target = TargetDescription(num_sms=H200.sms)
  splits = SplitKV.of(target, shape.num_kv_heads)
  lines = [
    _row("batch", "context", "items", "KV MB", "bytes floor us", "by data sheet us",
         "FLOP floor us", "predicted us", "target us", "measured us"),
    _row(*["---:"] * 10),
  ]  # fmt: skip
  for batch, context in sorted(settings.decodes):
    items = decode_items(batch, context, splits)
    floors = decode(shape, batch, context, H200, items)
    spec = decode(shape, batch, context, H200_SPEC, items)
    lines.append(
      _row(batch, f"{context:,}", items, f"{batch * context * shape.kv_bytes / 1e6:,.1f}",
           _us(floors.bytes), _us(spec.bytes), _us(floors.flops), _us(floors.predicted),
           _us(floors.target), "not measured")
    )  # fmt: skip
  return "\n".join(lines)


def _chunk_table(settings):
  shape = settings.shape
  lines = [
    _row("chunk", "prefix", "GFLOP", "FLOP floor us", "by data sheet us", "bytes floor us",
         "predicted us", "target us", "measured us"),
    _row(*["---:"] * 9),
  ]  # fmt: skip
  for tokens, prefix in sorted(settings.chunks):
    floors = chunk(shape, tokens, prefix, H200)
    spec = chunk(shape, tokens, prefix, H200_SPEC)
    lines.append(
      _row(f"{tokens:,}", f"{prefix:,}", f"{chunk_flops(shape, tokens, prefix) / 1e9:,.1f}",
           _us(floors.flops), _us(spec.flops), _us(floors.bytes), _us(floors.predicted),
           _us(floors.target), "not measured")
    )  # fmt: skip
  return "\n".join(lines)


def _fusion_table(settings):
  lines = [
    _row("step", "saved MB", "weights MB", "KV MB", "saved us", "layer's floor us", "share"),
    _row(*["---:"] * 7),
  ]
  steps = (
    ("1 decode at 2,048", 1, [2047]), ("32 decodes at 2,048", 32, [2047] * 32),
    ("128 decodes at 4,096", 128, [4095] * 128), ("chunk of 2,048 after 30,720", 2048, [30720]),
    ("chunk of 8,192 after 0", 8192, [0]),
  )  # fmt: skip
  for name, tokens, prefixes in steps:
    found = fusion(settings.shape, 4096, 14336, tokens, prefixes, H200)
    megabytes = [f"{found[key] / 1e6:,.2f}" for key in ("saved", "weights", "kv")]
    share = f"{found['saved_s'] / found['layer_s']:.2%}"
    lines.append(_row(name, *megabytes, _us(found["saved_s"]), _us(found["layer_s"]), share))
  return "\n".join(lines)


def _filling_table(settings):
  """Where the planner leaves multiprocessors idle, for equal decodes."""
  from jaxserve.config import SplitKV, TargetDescription

  shape, context = settings.shape, 4096
  lines = [_row("batch", *(f"waves={n}" for n in (1, 2, 3))), _row(*["---:"] * 4)]
  for batch in (1, 4, 8, 12, 16, 18, 20, 24, 28, 32, 40, 48, 64, 96, 128):
    cells = []
    for waves in (1, 2, 3):
      target = TargetDescription(num_sms=H200.sms, waves=waves)
      splits = SplitKV.of(target, shape.num_kv_heads)
      items = decode_items(batch, context, splits)
      filled = occupied(items * shape.num_kv_heads, H200.sms)
      cells.append(f"{items} items, {filled:.0%}")
    lines.append(_row(batch, *cells))
  return "\n".join(lines)
