"""The decode kernel: one query, all heads, over the pages of its row; compiled by numba.

Page by page: scores of the page's keys, an online softmax in float32, then the values. Two loops,
over scores and values, are written in LLVM vectors of 16 numbers: left to its cost model LLVM takes
half as wide ones, and sums in memory. bfloat16 is taken in pairs: of a word that holds two, a shift
gives the even one and a mask the odd one as float32. So queries and sums lie even ones first, odd
ones second, as long as a query is worked on.
"""

import functools
import pathlib
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels.ragged_paged_attention import numba_cpu_ffi as ffi

WORK_COLUMNS = 8
MOST_LANES = 16

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_MASKED = np.float32(-1e30)
_LOWEST = np.float32(-126.0)
_LINE = 64  # bytes of a cache line


def lanes(dim: int) -> int:
  """Numbers of a vector: the largest power of two in half of a head, at most 16."""
  half = dim // 2
  return min(MOST_LANES, half & -half)


def scratch_size(heads: int, dim: int, page_size: int) -> int:
  """float32s that a call works in: query, sums, scores, maxima and totals."""
  return 2 * heads * dim + heads * page_size + 2 * heads


@intrinsic
def floats(context: Any, address: Any) -> Any:
  """An address, u64, as a pointer to float32."""
  kind = types.CPointer(types.float32)

  def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(kind))

  return kind(types.uint64), codegen


@intrinsic
def _from_bits(context: Any, bits: Any) -> Any:
  def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.bitcast(arguments[0], _F32)

  return types.float32(types.int32), codegen


class _Vectors:
  """Builds LLVM of float32 vectors for heads of `dim` numbers at addresses."""

  def __init__(self, builder: Any, dim: int):
    self.builder, self.lanes, self.dim = builder, lanes(dim), dim
    self.kind = ir.VectorType(_F32, self.lanes)
    self.words = ir.VectorType(_I32, self.lanes)

  def at(self, address: Any, count: int, stride: int = 4) -> Any:
    """`address` moved by a static number of float32s."""
    return self.builder.add(address, ir.IntType(64)(count * stride))

  def load(self, address: Any, kind: Any) -> Any:
    return self.builder.load(ffi.pointer(self.builder, address, kind), align=4)

  def head(self, address: Any) -> list[Any]:
    """The float32s of a head, even ones first."""
    return [self.load(self.at(address, i), self.kind) for i in range(0, self.dim, self.lanes)]

  def bfloat16(self, address: Any) -> list[Any]:
    """The same of a head of bfloat16."""
    b, even, odd = self.builder, [], []
    for i in range(0, self.dim // 2, self.lanes):
      pairs = self.load(self.at(address, i), self.words)
      even.append(b.bitcast(b.shl(pairs, self.all(_I32(16), self.words)), self.kind))
      high = self.all(_I32(0xFFFF0000), self.words)
      odd.append(b.bitcast(b.and_(pairs, high), self.kind))
    return even + odd

  def all(self, scalar: Any, kind: Any) -> Any:
    """A vector of one number."""
    if isinstance(scalar, ir.Constant):
      return ir.Constant(kind, [scalar] * kind.count)
    one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
    mask = ir.Constant(ir.VectorType(_I32, kind.count), [_I32(0)] * kind.count)
    return self.builder.shuffle_vector(one, one, mask)

  def fma(self, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, in one rounding where the processor can."""
    flags = ("contract",)
    return self.builder.fadd(self.builder.fmul(a, b, flags=flags), c, flags=flags)

  def total(self, vector: Any) -> Any:
    """The sum of a vector, halves by halves."""
    b, count = self.builder, self.lanes
    while count > 1:
      count //= 2
      low, high = (
        ir.Constant(ir.VectorType(_I32, count), [_I32(i + k) for i in range(count)])
        for k in (0, count)
      )
      vector = b.fadd(b.shuffle_vector(vector, vector, low), b.shuffle_vector(vector, vector, high))
    return b.extract_element(vector, _I32(0))

  def prefetch(self, address: Any) -> None:
    """Asks for a head of bfloat16 at `address`."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    call = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
    for offset in range(0, 2 * self.dim, _LINE):
      at = self.builder.inttoptr(self.at(address, offset, 1), byte)
      self.builder.call(call, [at, _I32(0), _I32(2), _I32(1)])


def _static(heads: Any, kv_heads: Any, dim: Any, page_size: Any) -> tuple[int, int, int, int]:
  """(heads of a group, bytes from one key to the next, dim, page_size) of literal types."""
  heads, kv_heads, dim, page_size = (x.literal_value for x in (heads, kv_heads, dim, page_size))
  return heads // kv_heads, 2 * kv_heads * dim, dim, page_size


@intrinsic(prefer_literal=True)
def add_scores(
  context: Any, q: Any, keys: Any, ahead: Any, out: Any, begin: Any, end: Any, heads: Any,
  kv_heads: Any, dim: Any, page_size: Any,
) -> Any:  # fmt: skip
  """Scores of keys [begin, end) of a page against a KV head's queries.

  q: u64, address of f32[group, dim]. keys: u64, of bf16 with `stride` bytes from key to key. ahead:
  u64, like keys, what to prefetch. out: u64, of f32[group, page_size]. The last four are static.
  """
  group, stride, dim, page_size = _static(heads, kv_heads, dim, page_size)

  def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    q, keys, ahead, out, begin, end = arguments[:6]
    v = _Vectors(builder, dim)
    queries = [v.head(v.at(q, g * dim)) for g in range(group)]
    with cgutils.for_range(builder, end, start=begin) as loop:
      offset = builder.mul(loop.index, ir.IntType(64)(stride))
      v.prefetch(builder.add(ahead, offset))
      key = v.bfloat16(builder.add(keys, offset))
      to = builder.add(out, builder.mul(loop.index, ir.IntType(64)(4)))
      for g, query in enumerate(queries):
        total = ir.Constant(v.kind, [0.0] * v.lanes)
        for a, b in zip(query, key, strict=True):
          total = v.fma(a, b, total)
        builder.store(v.total(total), ffi.pointer(builder, v.at(to, g * page_size), _F32))
    return context.get_dummy_value()

  return types.void(*[types.uint64] * 6, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def add_values(
  context: Any, sums: Any, values: Any, ahead: Any, weights: Any, begin: Any, end: Any, heads: Any,
  kv_heads: Any, dim: Any, page_size: Any,
) -> Any:  # fmt: skip
  """Adds values [begin, end) of a page, times their weights, to a KV head's sums.

  sums: u64, address of f32[group, dim]; otherwise like `add_scores`.
  """
  group, stride, dim, page_size = _static(heads, kv_heads, dim, page_size)

  def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    sums, values, ahead, weights, begin, end = arguments[:6]
    v = _Vectors(builder, dim)
    # Variables on the stack, which LLVM keeps in registers over the loop.
    kept = []
    for g in range(group):
      for value in v.head(v.at(sums, g * dim)):
        kept.append(cgutils.alloca_once(builder, v.kind))
        builder.store(value, kept[-1])
    count = dim // v.lanes
    with cgutils.for_range(builder, end, start=begin) as loop:
      offset = builder.mul(loop.index, ir.IntType(64)(stride))
      v.prefetch(builder.add(ahead, offset))
      value = v.bfloat16(builder.add(values, offset))
      at = builder.add(weights, builder.mul(loop.index, ir.IntType(64)(4)))
      for g in range(group):
        weight = v.all(v.load(v.at(at, g * page_size), _F32), v.kind)
        for part, own in zip(value, kept[g * count : (g + 1) * count], strict=True):
          builder.store(v.fma(part, weight, builder.load(own)), own)
    for i, own in enumerate(kept):
      builder.store(
        builder.load(own), ffi.pointer(builder, v.at(sums, i * v.lanes), v.kind), align=4
      )
    return context.get_dummy_value()

  return types.void(*[types.uint64] * 6, *[types.int64] * 4), codegen


@njit(inline="always")
def _exp2(x):  # type: ignore[no-untyped-def]
  """2**x for x <= 0 with a relative error below 3e-7; 2**-126 stands for less."""
  f32 = np.float32
  x = max(x, _LOWEST)
  whole = np.int32(x - f32(0.5))
  f = x - f32(whole)
  y = f32(0.0096181291) + f * (f32(0.0013333558) + f * f32(0.00015403530))
  y = f32(0.24022651) + f * (f32(0.055504109) + f * y)
  y = f32(1.0) + f * (f32(0.69314718) + f * y)
  return y * _from_bits((whole + np.int32(127)) << np.int32(23))


@njit(inline="always")
def _soften(scores, sums, top, total, heads, dim, size):  # type: ignore[no-untyped-def]
  """Scores [heads, size] become weights, what was summed before is scaled to the new maximum."""
  U = np.uint64
  for h in range(U(heads)):
    best = top[h]
    for j in range(U(size)):
      best = max(best, scores[h * U(size) + j])
    keep = _exp2(top[h] - best)
    added = np.float32(0.0)
    for j in range(U(size)):
      weight = _exp2(scores[h * U(size) + j] - best)
      scores[h * U(size) + j] = weight
      added += weight
    top[h] = best
    total[h] = total[h] * keep + added
    for d in range(U(dim)):
      sums[h * U(dim) + d] *= keep


@njit(inline="always")
def _query(q, own, sums, top, total, start, heads, dim, scale):  # type: ignore[no-untyped-def]
  """The query of row `start` of q, scaled, even numbers first; nothing summed."""
  U = np.uint64
  half = U(dim // 2)
  for h in range(U(heads)):
    top[h], total[h] = _MASKED, np.float32(0.0)
    for d in range(half):
      at = (start * U(heads) + h) * U(dim) + U(2) * d
      own[h * U(dim) + d] = q[at] * scale
      own[h * U(dim) + half + d] = q[at + U(1)] * scale
    for d in range(U(dim)):
      sums[h * U(dim) + d] = np.float32(0.0)


@njit(inline="always")
def _finish(out, sums, total, start, heads, dim):  # type: ignore[no-untyped-def]
  """The inverse of `_query`."""
  U = np.uint64
  half = U(dim // 2)
  for h in range(U(heads)):
    r = np.float32(1.0) / total[h]
    for d in range(half):
      at = (start * U(heads) + h) * U(dim) + U(2) * d
      out[at] = sums[h * U(dim) + d] * r
      out[at + U(1)] = sums[h * U(dim) + half + d] * r


@njit(inline="always")
def _page_of(table, page, first_page, bytes_of_page):  # type: ignore[no-untyped-def]
  """Offset of the page that `table`, an address, has at index `page`."""
  return np.uint64(np.int64(ffi.i32(table, np.uint64(4) * page)) + first_page) * bytes_of_page


@njit(inline="always")
def _pages(places, table, first_page, last, window, heads, kv_heads, dim, size):  # type: ignore[no-untyped-def]
  """All pages of one query whose last key is at `last`; places as `rows` has them."""
  U = np.uint64
  own, sums, weights, top, total, keys, values = places
  group, stride = heads // kv_heads, kv_heads * dim * 2
  scores = carray(floats(weights), heads * size)
  first = np.int64(0) if window == 0 else max(last - window + 1, np.int64(0))
  pages = U(last // size + 1)
  at = _page_of(table, U(first // size), first_page, U(size * stride))
  for page in range(U(first // size), pages):
    begin = U(max(first - np.int64(page) * size, 0))
    end = U(min(last - np.int64(page) * size + 1, size))
    # The last page is followed by itself.
    following = _page_of(table, min(page + U(1), pages - U(1)), first_page, U(size * stride))
    if end - begin < U(size):
      for i in range(U(heads * size)):
        scores[i] = _MASKED
    for h in range(U(kv_heads)):
      head, place = at + h * U(2 * dim), weights + h * U(4 * group * size)
      add_scores(
        own + h * U(4 * group * dim), keys + head, values + head, place, begin, end, heads,
        kv_heads, dim, size,
      )  # fmt: skip
    _soften(
      scores, carray(floats(sums), heads * dim), carray(floats(top), heads),
      carray(floats(total), heads), heads, dim, size,
    )  # fmt: skip
    for h in range(U(kv_heads)):
      head, place = at + h * U(2 * dim), weights + h * U(4 * group * size)
      add_values(
        sums + h * U(4 * group * dim), values + head, keys + following + h * U(2 * dim), place,
        begin, end, heads, kv_heads, dim, size,
      )  # fmt: skip
    at = following


@njit(inline="always")
def _rows(frame, heads, kv_heads, dim, size, scale):  # type: ignore[no-untyped-def]
  """Every item of this call's part; see `numba_cpu` for the arguments, results and attributes."""
  U = np.uint64
  part, parts, window = (
    ffi.attribute(frame, U(0)),
    ffi.attribute(frame, U(1)),
    np.int64(ffi.attribute(frame, U(2))),
  )
  tokens, columns = ffi.dimension(frame, U(0), U(0)), ffi.dimension(frame, U(3), U(1))
  work, most = ffi.buffer(frame, U(4)), ffi.dimension(frame, U(4), U(0))
  items = min(np.int64(ffi.i32(ffi.buffer(frame, U(5)), U(0))), np.int64(most))
  first_page = np.int64(ffi.i32(ffi.buffer(frame, U(6)), U(0)))
  out = carray(floats(ffi.result(frame, U(0))), tokens * U(heads * dim))
  out[:] = np.float32(0.0)
  q = carray(floats(ffi.buffer(frame, U(0))), tokens * U(heads * dim))
  own = ffi.result(frame, U(0)) + U(4) * tokens * U(heads * dim)
  sums = own + U(4 * heads * dim)
  weights = sums + U(4 * heads * dim)
  top = weights + U(4 * heads * size)
  total = top + U(4 * heads)
  places = (own, sums, weights, top, total, ffi.buffer(frame, U(1)), ffi.buffer(frame, U(2)))
  for i in range(part, items, parts):
    item = work + U(4 * WORK_COLUMNS) * U(i)
    if ffi.i32(item, U(24)) == 0:  # of a split decode the first item does all
      start, last = U(ffi.i32(item, U(4))), np.int64(ffi.i32(item, U(12)))
      table = ffi.buffer(frame, U(3)) + U(4) * columns * U(ffi.i32(item, U(0)))
      _query(
        q, carray(floats(own), heads * dim), carray(floats(sums), heads * dim),
        carray(floats(top), heads), carray(floats(total), heads), start, heads, dim, scale,
      )  # fmt: skip
      _pages(places, table, first_page, last, window, heads, kv_heads, dim, size)
      _finish(
        out, carray(floats(sums), heads * dim), carray(floats(total), heads), start, heads, dim
      )


def compiled(
  heads: int, kv_heads: int, dim: int, page_size: int, version: str, cache_dir: pathlib.Path | None
) -> Any:
  """A numba cfunc, from its cache on disk where it is there.

  Args:
    heads: Hq.
    kv_heads: Hkv.
    dim: D.
    page_size: S.
    version: tells apart what the cache holds, besides this file's time and numba's version.
    cache_dir: private folder; None: where numba keeps its own.
  """
  scale = np.float32(np.log2(np.e) / np.sqrt(dim))

  def decode(frame):  # type: ignore[no-untyped-def]
    version  # noqa: B018, part of the cache's key as a variable of the closure
    done, error = ffi.answered(frame)
    if not done:
      _rows(frame, heads, kv_heads, dim, page_size, scale)
    return error

  make = functools.partial(cfunc, types.uint64(types.uint64), fastmath=True)
  usual = config.CACHE_DIR
  try:
    # Read when a function is marked as cached, and at no other time.
    config.CACHE_DIR = str(cache_dir) if cache_dir else usual
    return make(cache=True)(decode)
  except (RuntimeError, OSError):  # no folder can be written
    return make(cache=False)(decode)
  finally:
    config.CACHE_DIR = usual
