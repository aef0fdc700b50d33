"""The recorded run: vLLM 0.19.0, Llama-3.1-8B in bfloat16 on one RTX 4090."""

import dataclasses

from jaxserve.config import CacheConfig, SchedulerConfig

STEM = "llmservingsim_rtx4090_llama31_8b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What was served, and how the simulator is to see it.

  Attributes:
    traces_dir: folder of the recorded requests and of the profile's tables.
    pages: of the KV pool.
    page_size: tokens of a page.
    seats: requests running at once.
    budget: tokens of a step.
    length: most tokens of a request.
    layers: of the model; the tables have the times of one.
    host_ms: time of a step that no table has, for the last variant.
  """

  traces_dir: str
  pages: int = 2588
  page_size: int = 16
  seats: int = 256
  budget: int = 2048
  length: int = 8192
  layers: int = 32
  host_ms: float = 0.0

  def scheduler(self, slots: int) -> SchedulerConfig:
    """vLLM's rule, with room for all who wait."""
    return SchedulerConfig(
      cache=CacheConfig(num_pages=self.pages, page_size=self.page_size),
      max_num_seqs=self.seats, max_requests=slots, max_budget=self.budget,
      max_model_len=self.length, policy="vllm_v1",
    )  # fmt: skip
