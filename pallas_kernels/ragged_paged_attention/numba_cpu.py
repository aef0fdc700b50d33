"""Decodes in a kernel that numba compiles, chunks as in `xla`. For CPUs and pages of bfloat16.

XLA:CPU calls the kernel through its typed FFI. The items of a step are dealt to a few calls, which
it runs at the same time where there are cores; a query is computed by one of them, so its result
depends neither on how many there are nor on its neighbours.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.ragged_paged_attention import numba_cpu_ffi, numba_cpu_kernel, xla

_MOST_PARTS = 8

_lock = threading.Lock()
_targets: dict[tuple[int, ...], tuple[str, Any]] = {}


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
) -> jax.Array:
  """See `api.ragged_paged_attention`.

  Products are of float32 queries and weights with the stored bfloat16, sums are float32. Decodes
  that the kernel does not do (`can`) are those of `xla`.

  Cost: an item reads the keys and values that its query sees, once.
  """
  decodes = None
  if can(k_pages.dtype, q.shape[2], soft_cap):
    decodes = functools.partial(
      _decodes, q, k_pages, v_pages, block_tables, work, num_work, first_page, window
    )
  return xla.ragged_paged_attention(
    q,
    k_pages,
    v_pages,
    block_tables=block_tables,
    work=work,
    num_work=num_work,
    query_tile=query_tile,
    k_scales=k_scales,
    v_scales=v_scales,
    decode_items=decode_items,
    first_page=first_page,
    window=window,
    soft_cap=soft_cap,
    decodes=decodes,
  )


def can(dtype: Any, dim: int, soft_cap: float | None = None) -> bool:
  """Whether the kernel does these pages, heads and options."""
  return jnp.dtype(dtype).name in ("uint16", "bfloat16") and dim % 2 == 0 and soft_cap is None


def register(
  heads: int, kv_heads: int, dim: int, page_size: int, cache_dir: pathlib.Path | None = None
) -> str:
  """Compiles the kernel for these sizes, or reads it, and tells XLA of it, once in a process.

  An executable that calls it can be read only after that.

  Args:
    heads: Hq.
    kv_heads: Hkv.
    dim: D.
    page_size: S.
    cache_dir: private folder of compiled kernels; None: where numba keeps its own.

  Returns:
    The name of the target. It tells the kernel's source, so that no executable calls another one.
  """
  key = heads, kv_heads, dim, page_size
  with _lock:
    if key not in _targets:
      kernel = numba_cpu_kernel.compiled(*key, _digest(), cache_dir)
      name = f"jaxserve_decode_{_digest()}_{'_'.join(map(str, key))}"
      jax.ffi.register_ffi_target(name, _capsule(kernel.address), platform="cpu", api_version=1)
      _targets[key] = name, kernel
    return _targets[key][0]


@functools.cache
def _digest() -> str:
  """Of the source that the kernel is made of, and of how it is called."""
  files = (numba_cpu_ffi.__file__, numba_cpu_kernel.__file__, __file__)
  content = b"".join(pathlib.Path(file).read_bytes() for file in files)
  return hashlib.sha256(content).hexdigest()[:16]


def _capsule(address: int) -> Any:
  new = ctypes.pythonapi.PyCapsule_New
  new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
  return new(address, b"xla._CUSTOM_CALL_TARGET", None)


def _decodes(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  block_tables: jax.Array,
  work: jax.Array,
  num_work: jax.Array,
  first_page: jax.Array | int,
  window: int | None,
) -> jax.Array:
  """f32[T, Hq * D] with the rows of decodes, all others zero."""
  tokens, heads, dim = q.shape
  _, page_size, kv_heads, _ = k_pages.shape
  if k_pages.dtype == jnp.bfloat16:
    k_pages, v_pages = (lax.bitcast_convert_type(x, jnp.uint16) for x in (k_pages, v_pages))
  # What a call works in lies behind its result: XLA would give all calls one buffer for it, and so
  # run them one after another.
  scratch = -(-numba_cpu_kernel.scratch_size(heads, dim, page_size) // (heads * dim))
  call = jax.ffi.ffi_call(
    register(heads, kv_heads, dim, page_size),
    jax.ShapeDtypeStruct((tokens + scratch, heads * dim), jnp.float32),
  )
  arguments = (
    q.astype(jnp.float32),
    k_pages,
    v_pages,
    *(jnp.asarray(x, jnp.int32) for x in (block_tables, work, num_work)),
    jnp.asarray(first_page, jnp.int32).reshape(1),
  )
  parts = min(os.cpu_count() or 1, _MOST_PARTS, tokens)
  options = dict(parts=np.int32(parts), window=np.int32(window or 0))
  outs = [call(*arguments, part=np.int32(part), **options)[:tokens] for part in range(parts)]
  return functools.reduce(jnp.add, outs)
