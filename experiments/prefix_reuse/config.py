"""Pools and pages for the trace, and the two turns of the chat."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is measured.

  Attributes:
    trace: with the text of its prompts as ids of blocks; None: without that part.
    page_size: tokens a page, for the trace.
    pools: pages, rising; 0: as many as the whole trace fills.
    model: of the chat, as for jaxserve.main; None: without that part.
    first: tokens of the first prompt.
    second: tokens that the second turn adds.
    outputs: of each turn.
    chats: two-turn chats, each with a text of its own; the medians are shown.
    budget: of the engine.
    cache_dir: converted models and compiled executables.
  """

  trace: str | None = None
  page_size: int = 512
  pools: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384, 0)
  model: str | None = "smollm2-135m"
  first: int = 2000
  second: int = 200
  outputs: int = 32
  chats: int = 5
  budget: int = 512
  cache_dir: str = "~/.cache/jaxserve"
