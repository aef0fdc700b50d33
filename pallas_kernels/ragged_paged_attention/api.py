"""The one entry point, its checks, and the literal table of implementations."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

Implementation = Literal["xla", "ref", "numba", "mosaic_gpu"]

# Modules, imported when first used: what one device needs may not exist on another.
IMPLEMENTATIONS: Mapping[str, str] = {
  "xla": "pallas_kernels.ragged_paged_attention.xla",
  "ref": "pallas_kernels.ragged_paged_attention.ref",
  "numba": "pallas_kernels.ragged_paged_attention.numba_cpu",
  "mosaic_gpu": "pallas_kernels.ragged_paged_attention.mosaic_gpu",
}

PAGE_DTYPES = ("float64", "float32", "float16", "bfloat16", "uint16", "int8")
WORK_COLUMNS = 8

_GPU_HEAD_DIMS = (64, 128)
_GPU_PAGE_SIZES = (16, 32, 64, 128)
_GPU_DTYPES = ("bfloat16", "float16")
_GPU_MOST_GROUPED = 8
_CPU_DTYPES = ("bfloat16", "uint16")


def ragged_paged_attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  *,
  block_tables: jax.Array,
  work: jax.Array,
  num_work: jax.Array,
  query_tile: int,
  k_scales: jax.Array | None = None,
  v_scales: jax.Array | None = None,
  decode_items: int | None = None,
  first_page: jax.Array | int = 0,
  window: int | None = None,
  soft_cap: float | None = None,
  implementation: Implementation = "xla",
) -> jax.Array:
  """Attends every scheduled query to all keys of its row up to its own position.

  Work item (row, t, n, p, kv_start, kv_end, split, num_splits): queries t..t+n-1 of `q` are the
  tokens at positions p..p+n-1 of the row, and query i sees the keys at positions 0..p+i, which
  already lie in the row's pages. The scale is 1/sqrt(D). Slots past a row's last query are never
  used, whatever they hold.

  Decodes have one query and may be split: `num_splits` consecutive items of the same query, with
  split = 0..num_splits-1, whose ranges [kv_start, kv_end) are not empty, in order, and cover
  [0, p+1). All other items have kv_start 0, kv_end p+n, split 0 and num_splits 1. The ranges say
  who does which part; the result is of all keys. `mosaic_gpu` alone does as they say; the others
  compute each query once, whole.

  Args:
    q: [T, Hq, D], float.
    k_pages: [N, S, Hkv, D]; float, uint16 holding the bits of bfloat16, or int8 with scales.
    v_pages: like k_pages.
    block_tables: i32[R, M], page ids of each row in order of position; any valid id past its end.
    work: i32[W, 8], work items; no two share a query, but the splits of one decode.
    num_work: i32[2]; items [0, num_work[0]) are of decodes, items up to num_work[1] have at most
      `query_tile` queries, the rest is padding.
    query_tile: static, most queries of one item; at most T.
    k_scales: f32[N, S, Hkv], a key of int8 pages is its numbers times this; None for others.
    v_scales: like k_scales.
    decode_items: static, num_work[0] is at most this; None: W. `mosaic_gpu` alone uses it.
    first_page: added to every page id, so that all layers can share one pool of pages.
    window: static, a query at position p sees keys p-window+1..p only, whatever the slots and page
      ids before them hold; None: all.
    soft_cap: static, scaled scores x become soft_cap * tanh(x / soft_cap) before they are masked.
    implementation: a key of `IMPLEMENTATIONS`.

  Returns:
    [T, Hq, D] of q's dtype; rows that no item names are zero.

  Raises:
    NotImplementedError: if the implementation does not exist or cannot do these dtypes.
    ValueError: if shapes do not fit together, or an option is out of range.
  """
  if implementation not in IMPLEMENTATIONS:
    raise NotImplementedError(
      f"ragged_paged_attention: no implementation {implementation!r}; "
      f"there are {sorted(IMPLEMENTATIONS)}"
    )
  _check(q, k_pages, v_pages, work, query_tile)
  decode_items = work.shape[0] if decode_items is None else decode_items
  _check_options(work, decode_items, window, soft_cap)
  _check_scales(k_pages, k_scales, v_scales)
  scales = {} if k_scales is None else {"k_scales": k_scales, "v_scales": v_scales}
  if scales and implementation == "mosaic_gpu":
    raise NotImplementedError("ragged_paged_attention 'mosaic_gpu': int8 pages; use 'xla'")
  return load(implementation)(
    q,
    k_pages,
    v_pages,
    block_tables=block_tables,
    work=work,
    num_work=num_work,
    query_tile=query_tile,
    decode_items=decode_items,
    first_page=first_page,
    window=window,
    soft_cap=soft_cap,
    **scales,
  )


def load(implementation: str) -> Callable[..., jax.Array]:
  """The entry point of a key of `IMPLEMENTATIONS`; imports its module."""
  module = importlib.import_module(IMPLEMENTATIONS[implementation])
  function: Callable[..., jax.Array] = module.ragged_paged_attention
  return function


def unsupported(
  implementation: str,
  *,
  platform: str,
  compute_capability: str | None,
  head_dim: int,
  group: int,
  page_size: int,
  dtype: Any,
) -> str | None:
  """Why an implementation cannot serve a model on a device; imports and traces nothing.

  `mosaic_gpu` is for Hopper GPUs; head dimensions of 96 and 256 are left to `xla`. `numba` is for
  CPUs, and needs the package of that name.

  Args:
    implementation: a key of `IMPLEMENTATIONS`.
    platform: of the device: "cpu", "gpu", "tpu".
    compute_capability: of a GPU, such as "9.0"; None for others.
    head_dim: D.
    group: query heads of one KV head.
    page_size: S.
    dtype: of queries and pages.

  Returns:
    The reason, for people; None if it can.

  Raises:
    NotImplementedError: there is no such implementation.
  """
  if implementation not in IMPLEMENTATIONS:
    raise NotImplementedError(
      f"ragged_paged_attention: no implementation {implementation!r}; "
      f"there are {sorted(IMPLEMENTATIONS)}"
    )
  name = jnp.dtype(dtype).name
  checks: tuple[tuple[bool, str], ...] = ()
  if implementation == "numba":
    checks = (
      (platform == "cpu", f"platform {platform!r} is not a CPU"),
      (name in _CPU_DTYPES, f"dtype {name} is not bfloat16"),
      (head_dim % 2 == 0, f"head_dim={head_dim} is odd"),
      (bool(importlib.util.find_spec("numba")), "numba is missing: pip install 'jaxserve[cpu]'"),
    )
  elif implementation == "mosaic_gpu":
    checks = (
      (platform == "gpu", f"platform {platform!r} is not a GPU"),
      (
        str(compute_capability).split(".")[0] == "9",
        f"compute capability {compute_capability} is not 9.x (Hopper)",
      ),
      (head_dim in _GPU_HEAD_DIMS, f"head_dim={head_dim} is not one of {_GPU_HEAD_DIMS}"),
      (group <= _GPU_MOST_GROUPED, f"{group} query heads a KV head, at most {_GPU_MOST_GROUPED}"),
      (page_size in _GPU_PAGE_SIZES, f"page_size={page_size} is not one of {_GPU_PAGE_SIZES}"),
      (name in _GPU_DTYPES, f"dtype {name} is not one of {_GPU_DTYPES}"),
    )
  return next((reason for ok, reason in checks if not ok), None)


def _check(
  q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, work: jax.Array, query_tile: int
) -> None:
  if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
    raise ValueError(
      f"k_pages {k_pages.dtype}{k_pages.shape} and v_pages {v_pages.dtype}{v_pages.shape} differ"
    )
  if q.shape[2] != k_pages.shape[3] or q.shape[1] % k_pages.shape[2]:
    raise ValueError(
      f"q {q.shape} does not fit pages {k_pages.shape}: head_dim must be equal, heads a multiple"
    )
  if work.ndim != 2 or work.shape[1] != WORK_COLUMNS:
    raise ValueError(f"work {work.shape} must be [W, {WORK_COLUMNS}]")
  if not 1 <= query_tile <= q.shape[0]:
    raise ValueError(f"query_tile={query_tile} must be in [1, T={q.shape[0]}]")
  if not jnp.issubdtype(q.dtype, jnp.floating):
    raise NotImplementedError(f"ragged_paged_attention: queries of {q.dtype}; use a float dtype")
  if str(k_pages.dtype) not in PAGE_DTYPES:
    raise NotImplementedError(
      f"ragged_paged_attention: pages of {k_pages.dtype}; supported are {PAGE_DTYPES}"
    )


def _check_scales(
  k_pages: jax.Array, k_scales: jax.Array | None, v_scales: jax.Array | None
) -> None:
  if (k_pages.dtype == jnp.int8) != (k_scales is not None and v_scales is not None):
    raise ValueError(f"pages of {k_pages.dtype}: scales go with int8 pages, and only with them")
  for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
    if scales is not None and scales.shape != k_pages.shape[:3]:
      raise ValueError(f"{name} {scales.shape} must be {k_pages.shape[:3]}, one a head and slot")


def _check_options(
  work: jax.Array, decode_items: int, window: int | None, soft_cap: float | None
) -> None:
  if not 0 <= decode_items <= work.shape[0]:
    raise ValueError(f"decode_items={decode_items} must be in [0, W={work.shape[0]}]")
  if window is not None and window < 1:
    raise ValueError(f"window={window} must be at least 1, or None")
  if soft_cap is not None and not soft_cap > 0:
    raise ValueError(f"soft_cap={soft_cap} must be positive, or None")
