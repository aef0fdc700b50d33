"""What the prefix cache adds to the scheduler's state."""

import jax

from jaxserve.pytree import pytree_dataclass


@pytree_dataclass
class PrefixPool:
  """KV pages that remember what they hold.

  A page has content if word 0 of its digest is not zero. A free page with content can still be
  hit; it is handed out when no free page without content is left, the longest unused first.
  `index` and `log` are never cleaned: an entry counts only if the page agrees with it.

  refs: i32[N], holders; 0 = free.
  digests: u32[N, 4], of the content.
  index: i32[sets, ways], page ids; an entry counts if the page's digest is the one asked for.
  empty: i32[N], a stack of the free pages without content, the top at `num_empty` - 1.
  num_empty: i32[].
  log: i32[L], free pages with content in the order in which they were freed; an entry counts if
    the page is free, has content, and `cell` names this entry.
  cell: i32[N], the newest entry of each page; meaningless unless it is free with content.
  head, tail: i32[], entries before and from which on none counts.
  num_free: i32[], pages with refs 0.
  num_evicted: i32[], pages with content that were handed out; wraps.
  """

  refs: jax.Array
  digests: jax.Array
  index: jax.Array
  empty: jax.Array
  num_empty: jax.Array
  log: jax.Array
  cell: jax.Array
  head: jax.Array
  tail: jax.Array
  num_free: jax.Array
  num_evicted: jax.Array


@pytree_dataclass
class Reuse:
  """What requests hold that others may reuse.

  digests: u32[Q, M, 4], of the pages of prompt and outputs; word 0 is never zero.
  num_digests: i32[Q], pages whose digest is known, full ones only.
  num_full: i32[Q], held pages all of whose tokens are computed, or promised by a step already
    scheduled.
  num_published: i32[Q], full pages whose digest the pool was told.
  num_shared: i32[Q], pages that it did not compute itself; nothing is ever written to them.
  reads: bool[Q], whether it may hit; everybody publishes.
  """

  digests: jax.Array
  num_digests: jax.Array
  num_full: jax.Array
  num_published: jax.Array
  num_shared: jax.Array
  reads: jax.Array
