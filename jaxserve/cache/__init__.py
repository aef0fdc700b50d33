"""The KV page pool: which pages are free, who gets them, what they hold. No tensors here.

`allocate` and `release` work on both kinds of pool: a plain stack, and one with a prefix cache.
"""

from typing import TypeVar

import jax

from jaxserve.cache import pages, prefix
from jaxserve.cache.digests import PageChain, page_digests, root_digest
from jaxserve.types import PagePool, PrefixPool

Pool = TypeVar("Pool", PagePool, PrefixPool)

__all__ = [
  "PageChain", "Pool", "allocate", "create", "page_digests", "prefix", "release", "root_digest",
]  # fmt: skip

create = pages.create


def allocate(pool: Pool, count: jax.Array, size: int) -> tuple[Pool, jax.Array]:
  """`pages.allocate` or `prefix.allocate`."""
  return (prefix if isinstance(pool, PrefixPool) else pages).allocate(pool, count, size)


def release(pool: Pool, ids: jax.Array, count: jax.Array) -> Pool:
  """`pages.release` or `prefix.release`."""
  return (prefix if isinstance(pool, PrefixPool) else pages).release(pool, ids, count)
