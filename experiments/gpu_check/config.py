"""What a run of the check does: sizes of every stage, full and tiny, and their time limits."""

import dataclasses
import pathlib

# In this order: what is worth knowing first comes first. Torch gets a process of its own.
STAGES = (
  "machine", "numerics", "engine", "decode", "prefill", "serving", "torch", "cudnn", "others",
)  # fmt: skip

# Shares of the time budget that a stage may use; what it leaves goes to those after it.
SHARES = {
  "machine": 0.10, "numerics": 0.24, "engine": 0.14, "decode": 0.14, "prefill": 0.14,
  "serving": 0.32, "torch": 0.12, "cudnn": 0.08, "others": 0.06,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """Attention of one layer of a model, and its cache."""

  num_heads: int = 32
  num_kv_heads: int = 8
  head_dim: int = 128
  page_size: int = 64
  dtype: str = "bfloat16"

  @property
  def group(self):
    return self.num_heads // self.num_kv_heads

  @property
  def kv_bytes(self):
    """Bytes of keys and values of a token."""
    return 2 * 2 * self.num_kv_heads * self.head_dim


LLAMA3_8B = Shape()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
  """One batch against the reference. A row is (tokens of the step, tokens before it)."""

  name: str
  kv_heads: int = 2
  group: int = 4
  head_dim: int = 128
  page_size: int = 64
  dtype: str = "bfloat16"
  window: int | None = None
  soft_cap: float | None = None
  decodes: tuple[int, ...] = (0, 62, 63, 64, 300, 1411)
  chunks: tuple[tuple[int, int], ...] = ((1, 0), (37, 101), (130, 0), (64, 64), (200, 77))
  spare_pages: int = 5  # of which nobody holds one; they hold NaN, like every unwritten slot

  @property
  def key(self):
    options = "".join(f" {k}={v}" for k, v in self.options.items() if v is not None)
    return (
      f"{self.name}: D={self.head_dim} group={self.group} page={self.page_size} "
      f"{self.dtype}{options}"
    )

  @property
  def options(self):
    return {"window": self.window, "soft_cap": self.soft_cap}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Everything a run does.

  Attributes:
    interpret: kernels run in the interpreter, on a CPU, on tiny sizes.
    seconds: the time budget of all stages together.
    case_seconds: after so long without a result a case counts as hung; by stage, "" for others.
    numerics: batches.
    writes: (tokens, KV heads, head_dim) of KV writes.
    shape: of the timed attention.
    decodes: (batch, context) in order of importance.
    chunks: (tokens, prefix) in order of importance.
    budgets: groups of token budgets that share an engine; 0 is off.
    decoders: of the serving stage.
    context: of each of them.
    prompt: that arrives.
    copy_bytes: of the array that is copied.
    matmul: width of the product.
    repeats: of which the median counts.
    repeat_seconds: that one repeat lasts, about.
    pool_tokens: least tokens of the pool that timed cases share.
    stages: to run, in order.
    executables: folder of the executables of engines, kept between runs; None: not kept.
  """

  interpret: bool = False
  seconds: float = 420
  case_seconds: dict = dataclasses.field(default_factory=lambda: {"": 75, "serving": 240})
  numerics: tuple[Numerics, ...] = ()
  writes: tuple[tuple[int, int, int], ...] = ()
  shape: Shape = LLAMA3_8B
  decodes: tuple[tuple[int, int], ...] = ()
  chunks: tuple[tuple[int, int], ...] = ()
  budgets: tuple[tuple[int, ...], ...] = ()
  decoders: int = 32
  context: int = 2048
  prompt: int = 32768
  copy_bytes: int = 1 << 32
  matmul: int = 8192
  repeats: int = 7
  repeat_seconds: float = 0.04
  pool_tokens: int = 0
  stages: tuple[str, ...] = STAGES
  executables: str | None = None

  @property
  def store(self):
    """Executables of earlier engines, or None."""
    from jaxserve.engine.store import ExecutableStore

    return ExecutableStore(pathlib.Path(self.executables)) if self.executables else None


def _all_numerics():
  base = Numerics(name="llama")
  of = lambda name, **fields: dataclasses.replace(base, name=name, **fields)
  return (
    base,
    of("smollm2", kv_heads=3, group=3, head_dim=64),
    of("qwen2.5", kv_heads=4, group=7),
    *(of("pages", page_size=size) for size in (16, 32, 128)),
    *(of("pages", page_size=size, head_dim=64) for size in (16, 128)),
    of("window", window=100),
    of("soft cap", soft_cap=20.0),
    of("both", window=333, soft_cap=5.0, head_dim=64, page_size=16),
    of("float16", dtype="float16"),
    of("float16", dtype="float16", head_dim=64, page_size=32, window=70),
    *(of("groups", group=group) for group in (1, 2, 8)),
    *(of("groups", group=group, head_dim=64, page_size=32) for group in (1, 8)),
    of("8 KV heads", kv_heads=8, group=4, decodes=(4095, 2500, 70, 1), chunks=((513, 1500),)),
    of("only decodes", decodes=tuple(range(1, 2400, 75)), chunks=()),
    of("only a chunk", decodes=(), chunks=((1024, 1000),)),
    of("window", window=64, page_size=128, group=7),
    of("pages", page_size=16, group=7, soft_cap=30.0),
    of("far pages", kv_heads=8, spare_pages=36000),  # 4.7 GB of K: byte offsets beyond 32 bits
  )


FULL = Settings(
  numerics=_all_numerics(),
  writes=((1, 8, 128), (7, 3, 64), (32, 8, 128), (2048, 8, 128), (300, 4, 128)),
  decodes=tuple(
    (batch, context)
    for context, batch in (
      (4096, 32), (4096, 1), (4096, 128), (4096, 8), (32768, 32), (1024, 32), (16384, 32),
      (32768, 1), (1024, 1), (1024, 128), (32768, 8), (16384, 8), (1024, 8), (16384, 1),
      (16384, 128), (32768, 128),
    )
  ),
  chunks=(
    *((2048, p) for p in (0, 32768, 8192, 16384)), *((8192, p) for p in (0, 32768)),
    *((512, p) for p in (32768, 0, 8192)), *((4096, p) for p in (0, 32768, 8192)),
    *((1024, p) for p in (32768, 0, 8192)), *((256, p) for p in (32768, 0, 8192)),
    (8192, 8192), (8192, 16384), (4096, 16384), (1024, 16384), (512, 16384), (256, 16384),
  ),
  budgets=((2048, 512), (0,), (8192, 1024), (4096, 1536)),
  pool_tokens=131072 * 32,
)  # fmt: skip

TINY = Settings(
  interpret=True,
  seconds=240,
  case_seconds={"": 120},
  numerics=(
    Numerics(
      name="tiny", kv_heads=1, group=3, head_dim=64, page_size=16, decodes=(20, 140),
      chunks=((21, 9),), spare_pages=2,
    ),
  ),
  writes=((5, 2, 64),),
  shape=Shape(num_heads=4, num_kv_heads=2, head_dim=64, page_size=16),
  decodes=((2, 64),),
  chunks=((32, 48),),
  budgets=((16, 0),),
  decoders=2,
  context=24,
  prompt=56,
  copy_bytes=1 << 20,
  matmul=128,
  repeats=2,
  repeat_seconds=0.001,
  pool_tokens=1024,
)  # fmt: skip
"""Small enough for the interpreter and one core: it shows that the code runs, and nothing else."""
