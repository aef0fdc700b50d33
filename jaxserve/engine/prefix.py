"""The host's part of the prefix cache: digests of what requests hold, and what was hit."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve import cache
from jaxserve.config import SchedulerConfig
from jaxserve.engine.request import Request, SamplingParams, Scheduled

NO_SALT = b""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixStats:
  """What the prefix cache did since the engine was built. Counts are of tokens, but for evictions.

  A request counts once, when it is admitted for the first time; what is computed again after a
  preemption is kept apart, for it would be found in the cache whatever the load.

  Attributes:
    queried: tokens of requests that were admitted.
    hit: those of them that were found.
    resumed_queried: tokens of requests that were admitted again.
    resumed_hit: those of them that were found.
    evicted: pages whose content was lost to somebody else.
  """

  queried: int = 0
  hit: int = 0
  resumed_queried: int = 0
  resumed_hit: int = 0
  evicted: int = 0

  @property
  def hit_rate(self) -> float:
    """Share of `queried` that was found; 0 before the first request."""
    return self.hit / self.queried if self.queried else 0.0

  def plus(self, parts: Iterable[Scheduled], evicted: int) -> "PrefixStats":
    """With one step more."""
    entered = [part for part in parts if part.admission]
    if not entered and not evicted:
      return self
    first = [part for part in entered if part.admission == "first"]
    again = [part for part in entered if part.admission == "again"]
    return PrefixStats(
      queried=self.queried + sum(part.known for part in first),
      hit=self.hit + sum(part.cached for part in first),
      resumed_queried=self.resumed_queried + sum(part.known for part in again),
      resumed_hit=self.resumed_hit + sum(part.cached for part in again),
      evicted=self.evicted + evicted,
    )


class PageDigests:
  """Makes digests of the pages of requests, for one configuration and salt."""

  def __init__(self, config: SchedulerConfig, salt: bytes):
    self.config, self.salt = config, salt

  def of_prompt(
    self, prompt: Sequence[int], sampling: SamplingParams
  ) -> tuple[cache.PageChain, tuple[np.ndarray, np.int32, np.bool_]]:
    """The chain of a new request, and what `sched.submit` takes of it.

    That is (digests u32[M, 4], how many they are, whether the request may hit).
    """
    root = cache.root_digest(self.salt, sampling.cache_salt)
    chain = cache.PageChain(prompt, self.config.cache.page_size, root)
    digests = np.zeros((self.config.pages_per_request, 4), np.uint32)
    digests[: chain.num_pages] = chain.prompt_digests
    # What is not computed has no scores.
    reads = sampling.reads_prefix_cache and sampling.prompt_logprobs is None
    return chain, (digests, np.int32(chain.num_pages), np.bool_(reads))

  def of_outputs(self, requests: Iterable[Request]) -> np.ndarray:
    """What `sched.commit` takes: the next digest of each request that has one, u32[Q, 4].

    Tokens that the chains have not seen yet are appended to them.
    """
    digests = np.zeros((self.config.max_requests, 4), np.uint32)
    for request in requests:
      assert request.chain is not None, "made when the request was submitted"
      digest = request.chain.catch_up(request.outputs)
      if digest is not None:
        digests[request.slot] = digest
    return digests
