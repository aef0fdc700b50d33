"""What is measured, and what each series is expected to do."""

import dataclasses
import pathlib

PARTS = ("model", "sizes", "scheduler", "host")

FLAT, LINEAR = "flat", "linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """One run.

  Attributes:
    model: as for jaxserve.main.
    cache_dir: of executables.
    only: parts, of PARTS.
    dtype: of weights and KV.
    page_size: tokens of a page.
    rows: decode rows of the first series, rising; the last is that of sizes, scheduler and host.
    rows_context: context of these.
    contexts: of decodes, rising.
    contexts_rows: rows of these.
    tokens: of steps that prefill, rising, in prompts of at most `prompt` tokens.
    prompt: see above.
    lengths: max_model_len, rising, at a context of `context`.
    pools: how often the pool of the first, which just holds all requests, is repeated.
    requests: max_requests in seats, rising.
    seats: max_num_seqs in `rows[-1]`, rising, as many of them decoding.
    context: of sizes and scheduler.
    rounds: interleaved repetitions; a figure is the least of the rounds' medians.
    steps: timed in a round.
    host_rounds: processes that measure the host, in turn with those of `base`.
    host_steps: timed by each.
    base: a checkout whose host time is measured in turn with this one's.
  """

  model: str = "random"
  cache_dir: pathlib.Path = pathlib.Path("~/.cache/jaxserve").expanduser()
  only: tuple[str, ...] = PARTS
  dtype: str = "bfloat16"
  page_size: int = 64
  rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
  rows_context: int = 512
  contexts: tuple[int, ...] = (64, 256, 1024, 2048, 4096)
  contexts_rows: int = 8
  tokens: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)
  prompt: int = 64
  lengths: tuple[int, ...] = (512, 4096, 16384)
  pools: tuple[int, ...] = (1, 4, 16, 64)
  requests: tuple[int, ...] = (2, 16)
  seats: tuple[int, ...] = (1, 4)
  context: int = 256
  rounds: int = 8
  steps: int = 12
  host_rounds: int = 2
  host_steps: int = 1000
  base: str | None = None

  def __post_init__(self) -> None:
    unknown = set(self.only) - set(PARTS)
    if unknown:
      raise ValueError(f"only={','.join(sorted(unknown))}: use some of {', '.join(PARTS)}")
    longest = max(self.context, self.prompt) + 1
    if self.lengths[0] <= longest:
      raise ValueError(f"lengths={self.lengths}: the first must exceed {longest}")
