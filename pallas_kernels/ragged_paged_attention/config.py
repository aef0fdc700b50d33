"""Static parameters of the Mosaic GPU kernels, and what they cost in shared memory."""

import dataclasses

# Columns of the work list, see `api`.
ROW, FIRST, COUNT, POSITION, KV_START, KV_END, SPLIT, NUM_SPLITS = range(8)
ROWS = 64  # of a wgmma tile: the least that a warpgroup multiplies at once
SHARED_MEMORY = 232448  # bytes that a block can have on Hopper
# Blocks of a grid: four for each of a Hopper GPU's 132 multiprocessors. So many that the hardware
# evens out units of different lengths, so few that those without a unit cost little.
BLOCKS = 4 * 132


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
  """What the operation is, apart from its sizes.

  Attributes:
    kv_heads: Hkv.
    group: query heads of each KV head.
    head_dim: D.
    page_size: S.
    window: keys that a query sees, itself included; None: all.
    soft_cap: scores become soft_cap * tanh(score / soft_cap); None: they stay.
    interpretable: use only forms that the interpreter can run: probabilities reach the second
      product through shared memory, and its result is added to the sum outside of it.
  """

  kv_heads: int
  group: int
  head_dim: int
  page_size: int
  window: int | None = None
  soft_cap: float | None = None
  interpretable: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
  """Tiling of the split-KV kernel.

  Attributes:
    keys: of a tile of K and V.
    stages: tiles that are in shared memory or on their way there.
    queries: most queries of an item.
    blocks: most blocks of the grid.
    padded_group: rows of a query's heads, `group` and padding: a multiple of 8, the rows that the
      copy engine moves at once into the layout of wgmma.
  """

  keys: int = 128
  stages: int = 3
  queries: int = 1
  blocks: int = BLOCKS
  padded_group: int = 8

  def __post_init__(self) -> None:
    if self.padded_group % 8 or self.rows > ROWS:
      raise ValueError(
        f"padded_group={self.padded_group}, queries={self.queries}: rows come in groups of 8, "
        f"and there are {ROWS}"
      )

  @property
  def rows(self) -> int:
    """Rows of the tile that are in use."""
    return self.queries * self.padded_group

  def shared_memory(self, head_dim: int) -> int:
    """Bytes of shared memory that a block needs, its barriers apart."""
    tiles = 2 * self.stages * self.keys * head_dim * 2
    return tiles + ROWS * head_dim * 4 + ROWS * 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """Tiling of the chunk kernel: two warpgroups of `ROWS` queries each, of one head.

  Attributes:
    keys: of a tile of K and V.
    stages: tiles that are in shared memory or on their way there.
    blocks: most blocks of the grid.
  """

  keys: int = 128
  stages: int = 2
  blocks: int = BLOCKS

  @property
  def queries(self) -> int:
    """Queries of an item."""
    return 2 * ROWS

  def shared_memory(self, head_dim: int) -> int:
    """Bytes of shared memory that a block needs, its barriers apart."""
    return 2 * self.stages * self.keys * head_dim * 2 + 2 * self.queries * head_dim * 2
