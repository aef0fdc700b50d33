"""The one entry point, its checks, and the literal table of implementations."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import ref, xla

Implementation = Literal["xla", "ref"]

IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
  "xla": xla.ragged_paged_attention,
  "ref": ref.ragged_paged_attention,
}

PAGE_DTYPES = ("float64", "float32", "float16", "bfloat16", "uint16")


def ragged_paged_attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  *,
  block_tables: jax.Array,
  work: jax.Array,
  num_work: jax.Array,
  query_tile: int,
  first_page: jax.Array | int = 0,
  implementation: Implementation = "xla",
) -> jax.Array:
  """Attends every scheduled query to all keys of its row up to its own position.

  Work item (row, t, n, p): queries t..t+n-1 of `q` are the tokens at positions p..p+n-1 of the row,
  and query i sees the keys at positions 0..p+i, which already lie in the row's pages. The scale is
  1/sqrt(D). Slots past a row's last query are never used, whatever they hold.

  Args:
    q: [T, Hq, D], float.
    k_pages: [N, S, Hkv, D]; float, or uint16 holding the bits of bfloat16.
    v_pages: like k_pages.
    block_tables: i32[R, M], page ids of each row in order of position; any valid id past its end.
    work: i32[W, 4], work items (row, first query, number of queries, position of the first query);
      no two items share a query.
    num_work: i32[2]; items [0, num_work[0]) are decodes, items up to num_work[1] have at most
      `query_tile`, the rest is padding.
    query_tile: static, most queries of one item; at most T.
    first_page: added to every page id, so that all layers can share one pool of pages.
    implementation: a key of `IMPLEMENTATIONS`.

  Returns:
    [T, Hq, D] of q's dtype; rows that no item names are zero.

  Raises:
    NotImplementedError: if the implementation does not exist or cannot do these dtypes.
    ValueError: if shapes do not fit together.
  """
  if implementation not in IMPLEMENTATIONS:
    raise NotImplementedError(
      f"ragged_paged_attention: no implementation {implementation!r}; "
      f"there are {sorted(IMPLEMENTATIONS)}"
    )
  _check(q, k_pages, v_pages, work, query_tile)
  return IMPLEMENTATIONS[implementation](
    q,
    k_pages,
    v_pages,
    block_tables=block_tables,
    work=work,
    num_work=num_work,
    query_tile=query_tile,
    first_page=first_page,
  )


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
  if work.ndim != 2 or work.shape[1] != 4:
    raise ValueError(f"work {work.shape} must be [W, 4]")
  if not 1 <= query_tile <= q.shape[0]:
    raise ValueError(f"query_tile={query_tile} must be in [1, T={q.shape[0]}]")
  if not jnp.issubdtype(q.dtype, jnp.floating):
    raise NotImplementedError(f"ragged_paged_attention: queries of {q.dtype}; use a float dtype")
  if str(k_pages.dtype) not in PAGE_DTYPES:
    raise NotImplementedError(
      f"ragged_paged_attention: pages of {k_pages.dtype}; supported are {PAGE_DTYPES}"
    )
