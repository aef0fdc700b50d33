"""Arguments that the operation is tested, compiled and timed with: the shapes of real models."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec:
  """The sizes of one call.

  Attributes:
    name: of the model.
    heads: Hq.
    kv_heads: Hkv.
    head_dim: D.
    tokens: T.
    rows: R.
    pages_per_row: M.
    num_pages: N.
    page_size: S.
    extra_items: items that splits of decodes may add to one per row.
    dtype: of queries and pages.
  """

  name: str
  heads: int
  kv_heads: int
  head_dim: int
  tokens: int
  rows: int = 256
  pages_per_row: int = 128
  num_pages: int = 8192
  page_size: int = 64
  extra_items: int = 49
  dtype: str = "bfloat16"

  @property
  def query_tile(self) -> int:
    """Most queries of an item."""
    return min(128, self.tokens)

  @property
  def decode_items(self) -> int:
    """Most decode items."""
    return min(self.rows, self.tokens) + self.extra_items

  @property
  def work_items(self) -> int:
    """W."""
    return self.decode_items + self.tokens // self.query_tile

  def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract array arguments of `api.ragged_paged_attention`, by name."""
    shape, number = jax.ShapeDtypeStruct, jnp.int32
    pages = self.num_pages, self.page_size, self.kv_heads, self.head_dim
    return {
      "q": shape((self.tokens, self.heads, self.head_dim), jnp.dtype(self.dtype)),
      "k_pages": shape(pages, jnp.dtype(self.dtype)),
      "v_pages": shape(pages, jnp.dtype(self.dtype)),
      "block_tables": shape((self.rows, self.pages_per_row), number),
      "work": shape((self.work_items, 8), number),
      "num_work": shape((2,), number),
      "first_page": shape((), number),
    }

  def options(self) -> dict[str, Any]:
    """Static arguments, by name."""
    return {"query_tile": self.query_tile, "decode_items": self.decode_items}


# Query heads, KV heads, head dimension.
MODELS: dict[str, tuple[int, int, int]] = {
  "llama3-8b": (32, 8, 128),
  "smollm2-135m": (9, 3, 64),
  "qwen2.5-7b": (28, 4, 128),
}


def of_model(name: str, tokens: int, **sizes: Any) -> ArgSpec:
  """The call of a model in `MODELS` with `tokens` tokens."""
  heads, kv_heads, head_dim = MODELS[name]
  return ArgSpec(
    name=name, heads=heads, kv_heads=kv_heads, head_dim=head_dim, tokens=tokens, **sizes
  )
