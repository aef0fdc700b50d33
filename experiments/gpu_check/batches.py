"""Batches as the engine would plan them, over pages that hold NaN wherever nothing was written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve import sched
from jaxserve.config import CacheConfig, PlanShape, SchedulerConfig, SplitKV, TargetDescription
from jaxserve.types import Decision

QUERY_TILE = 128  # of the chunk kernel
_FALLBACK_SMS = 132  # of an H100 or H200, where the device does not tell


@dataclasses.dataclass(frozen=True)
class Row:
  """`tokens` of a step after `context` others; a decode, or a chunk of a prompt."""

  tokens: int
  context: int
  decode: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What a call of attention takes, on the host."""

  shape: PlanShape
  block_tables: np.ndarray
  work: np.ndarray
  num_work: np.ndarray


def num_sms(device):
  """Multiprocessors of a device; those of an H100 where it does not tell."""
  return int(getattr(device, "core_count", 0) or _FALLBACK_SMS)


def splits_of(device, kv_heads):
  """How the engine splits decodes on this device."""
  return SplitKV.of(TargetDescription(num_sms=num_sms(device)), kv_heads)


@functools.cache
def _lay_out(config, shape):
  """The engine's layout, compiled for a CPU, and an empty state."""
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    return jax.jit(lambda s, d: _parts(sched.lay_out(s, d, shape))), sched.init(config)


def _parts(plan):
  return plan.block_tables, plan.work, plan.num_work


def plan(rows, tables, *, num_tokens, page_size, num_pages, longest, splits, num_rows=None):
  """Lays out a step.

  Args:
    rows: of the batch, in order.
    tables: page ids of each row.
    num_tokens: the bucket.
    page_size: of the cache.
    num_pages: of a layer.
    longest: most tokens of a row.
    splits: of decodes, see `splits_of`.
    num_rows: to pad the batch to.
  """
  size = num_rows or len(rows)
  cache = CacheConfig(num_pages=num_pages, page_size=page_size)
  config = SchedulerConfig(
    cache=cache, max_num_seqs=size, max_requests=size, max_budget=max(num_tokens, size),
    max_model_len=longest,
  )  # fmt: skip
  shape = PlanShape.of(config, num_tokens, QUERY_TILE, splits)
  lay_out, state = _lay_out(config, shape)
  column = lambda values: np.asarray([*values] + [0] * (size - len(rows)), np.int32)
  table = np.zeros((size, shape.pages_per_request), np.int32)
  for r, pages in enumerate(tables):
    table[r, : len(pages)] = pages
  off, zero = np.zeros(size, bool), np.zeros(size, np.int32)
  order = np.arange(size, dtype=np.int32)
  order[len(rows) :] = size
  decision = Decision(
    order=order, num_scheduled=np.int32(len(rows)),
    num_tokens=np.int32(sum(r.tokens for r in rows)), tokens=column(r.tokens for r in rows),
    start=column(r.context for r in rows), new_pages=zero, admitted=off, preempted=off,
    samples=off, arrival=zero,
  )  # fmt: skip
  prompts = column(0 if r.decode else r.context + r.tokens for r in rows)
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    state = dataclasses.replace(
      state, num_prompt=jnp.asarray(prompts), block_tables=jnp.asarray(table)
    )
    found = lay_out(state, jax.tree.map(jnp.asarray, decision))
  return Plan(
    shape=shape, **dict(zip(("block_tables", "work", "num_work"), map(np.asarray, found),
                            strict=True)),
  )  # fmt: skip


class Poisoned:
  """A random batch whose pages hold NaN in every slot that no row has written.

  rows: of the batch, decodes first.
  plan: of it.
  q: [T, Hq, D], of the case's dtype; T is past the last query, so some queries belong to nobody.
  used: page ids that hold something.
  k, v: [used, S, Hkv, D], those pages.
  """

  def __init__(self, case, splits, seed):
    rng = np.random.default_rng(seed)
    self.case, size = case, case.page_size
    self.rows = [Row(1, n, True) for n in case.decodes] + [Row(t, n, False) for t, n in case.chunks]
    counts = [-(-(row.tokens + row.context) // size) for row in self.rows]
    self.num_pages = sum(counts) + case.spare_pages
    ids = 1 + rng.permutation(self.num_pages - 1)[: sum(counts)]
    self.pages = np.split(ids, np.cumsum(counts)[:-1])
    self.used, self.dtype = ids, _numpy_dtype(case.dtype)
    self.k, self.v = (self._pages_of(rng) for _ in range(2))
    tokens = sum(row.tokens for row in self.rows)
    num_tokens = max(tokens + 3, QUERY_TILE)
    self.q = rng.standard_normal((num_tokens, case.kv_heads * case.group, case.head_dim))
    self.q = self.q.astype(self.dtype)
    self.plan = plan(
      self.rows, self.pages, num_tokens=num_tokens, page_size=size, num_pages=self.num_pages,
      longest=max(row.tokens + row.context for row in self.rows), splits=splits,
      num_rows=len(self.rows) + 1,
    )  # fmt: skip

  def _pages_of(self, rng):
    case = self.case
    slots = np.full((len(self.used) * case.page_size, case.kv_heads, case.head_dim), np.nan)
    at = 0
    for row, pages in zip(self.rows, self.pages, strict=True):
      length = row.tokens + row.context
      slots[at : at + length] = rng.standard_normal((length, case.kv_heads, case.head_dim))
      if case.window:  # what no query of the row sees may hold anything
        slots[at : at + max(row.context + 1 - case.window, 0)] = np.nan
      at += len(pages) * case.page_size
    return slots.reshape(-1, case.page_size, case.kv_heads, case.head_dim).astype(self.dtype)

  def pools(self):
    """K and V on the default device, [N, S, Hkv, D], NaN but for the pages in use."""
    shape = (self.num_pages, *self.k.shape[1:])

    def pool(pages):
      return jnp.full(shape, jnp.nan, self.dtype).at[self.used].set(pages)

    return tuple(map(jax.jit(pool), (self.k, self.v)))

  def expected(self):
    """[T, Hq, D] in float64; zero for queries of nobody."""
    out, at, page = np.zeros(self.q.shape), 0, 0
    for row, pages in zip(self.rows, self.pages, strict=True):
      here = slice(page, page + len(pages))
      length = row.tokens + row.context
      k, v = (x[here].reshape(-1, *x.shape[2:])[:length].astype(float) for x in (self.k, self.v))
      queries = self.q[at : at + row.tokens].astype(float)
      out[at : at + row.tokens] = _attention(queries, k, v, row.context, self.case)
      at, page = at + row.tokens, page + len(pages)
    return out

  def parts(self):
    """Queries of decodes that are not split, of those that are, and of chunks: slices of T."""
    work, (single, end) = self.plan.work, self.plan.num_work
    whole = [q for _, q, _, _, _, _, split, n in work[:single] if n == 1]
    merged = [q for _, q, _, _, _, _, split, n in work[:single] if n > 1 and split == 0]
    chunk = [q for _, first, n, *_ in work[single:end] for q in range(first, first + n)]
    return {"decode": whole, "merge": merged, "chunk": chunk}


def _attention(q, k, v, context, case):
  """Causal attention of [t, Hq, D] over [context + t, Hkv, D], written out."""
  length, kv_heads, dim = k.shape
  k, v = (np.nan_to_num(x) for x in (k, v))  # NaN is only where the window hides it
  grouped = q.reshape(len(q), kv_heads, -1, dim)
  scores = np.einsum("tkgd,skd->tkgs", grouped, k, optimize=True) / np.sqrt(dim)
  if case.soft_cap:
    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
  position, key = context + np.arange(len(q))[:, None], np.arange(length)[None]
  visible = key <= position
  if case.window:
    visible &= key > position - case.window
  scores = np.where(visible[:, None, None], scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum("tkgs,skd->tkgd", weights, v, optimize=True).reshape(q.shape)


def _numpy_dtype(name):
  return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
