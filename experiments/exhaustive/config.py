"""Which tiny schedulers are searched."""

import dataclasses

from experiments.exhaustive.model import Functions, Kind, Model
from jaxserve import sched
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.types import SchedulerParams

KINDS = {
  2: (Kind(1, 2), Kind(3, 2), Kind(2, 1)),
  3: (Kind(1, 3), Kind(3, 2), Kind(2, 1), Kind(5, 2)),
}
"""By pages, of two tokens: short and long ones, and one that fills the pool."""

TEXTS = {
  2: (Kind(2, 2), Kind(3, 2), Kind(3, 1, text=1)),
  3: (Kind(2, 2), Kind(4, 2), Kind(5, 2), Kind(4, 1, text=1)),
}
"""With a prefix cache: two begin alike, another does not."""

ARGUMENTS = {
  # A chunk of one token at least, of three at most.
  "sarathi_dynamic": {"low": 1, "high": 3, "stages": 2, "max_tokens": 4},
  # A step of two tokens keeps the target early in a prompt, late it does not.
  "slo_aware": {
    "itl_target_ms": 2.5, "min_chunk": 1, "token_ms": 1.0, "weights_ms": 1.0, "pair_ms": 0.1,
    "kv_ms": 0.1,
  },
  "bucket_shaped": {"max_padding": 0.01},
  # Decays within a step, so that the ratio has few values.
  "sglang": {"new_token_ratio_decay_steps": 1},
  "sglang_mixed": {"new_token_ratio_decay_steps": 1},
}  # fmt: skip
"""Hyper-parameters that matter for requests of a few tokens."""

_CARELESS = {"clip_max_new_tokens": 0, "page_overhead": 0}
VARIANTS = {
  "plain": {},
  "priority": {"ordering": "priority"},
  "gate": {"reserve": "gate"},
  "none": {"reserve": "none"},
  "await_host": {"await_host": True},
  "threshold": {"long_prefill_token_threshold": 2},
  "unchunked": {"chunked_prefill": False},
  "watermark": {"watermark": 0.34},
  "careless": {"policy": _CARELESS},
  "interval": {"policy": _CARELESS | {"prefill_decode_interval": 1}},
}
"""What is different from the defaults of `SchedulerConfig` and `make_params`."""

_STRUCTURE = ("ordering", "reserve")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """One search."""

  policy: str
  pages: int
  budget: int
  rows: int = 3
  overlap: bool = False
  prefix_cache: bool = False
  variant: str = "plain"

  def model(self, functions: Functions = Functions()) -> Model:  # noqa: B008
    """The scheduler that is searched. Settings that differ in the budget only share it."""
    changes = VARIANTS[self.variant]
    slots = 2 * self.pages
    reserves = sched.find_policy(self.policy).reserves_longest
    config = SchedulerConfig(
      cache=CacheConfig(num_pages=self.pages, page_size=2),
      max_num_seqs=self.rows, max_requests=self.rows, max_budget=max(4, self.rows),
      # The last token is never computed, so a request of slots + 1 tokens fills the pool.
      max_model_len=slots if reserves else slots + 1,
      policy=self.policy, prefix_cache=self.prefix_cache,
      **{name: changes[name] for name in _STRUCTURE if name in changes},
    )  # fmt: skip
    kinds = (TEXTS if self.prefix_cache else KINDS)[self.pages]
    if config.ordering == "priority":
      kinds = tuple(kind._replace(priority=i % 2) for i, kind in enumerate(kinds))
    if changes.get("await_host"):
      kinds = (*kinds, kinds[0]._replace(await_host=True))
    return Model(config, kinds, self.overlap, functions)

  def params(self) -> SchedulerParams:
    """Seats are as many as the budget has tokens for."""
    changes = {
      name: value for name, value in VARIANTS[self.variant].items()
      if name not in (*_STRUCTURE, "await_host", "policy")
    }  # fmt: skip
    arguments = ARGUMENTS.get(self.policy, {}) | VARIANTS[self.variant].get("policy", {})
    return sched.make_params(
      self.model().config, budget=self.budget, max_num_seqs=min(self.rows, self.budget),
      policy=arguments, **changes,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A grid of searches.

  Attributes:
    policies: names in `sched.POLICIES`.
    rows: requests that live at once, and seats.
    pages: sizes of the pool.
    budgets: token budgets.
    variants: some policies are also searched with other options.
    prefix_cache: all that go with one are also searched with it.
    most_states: of one search; more are an error.
  """

  policies: tuple[str, ...] = tuple(sched.POLICIES)
  rows: int = 3
  pages: tuple[int, ...] = (2, 3)
  budgets: tuple[int, ...] = (1, 2, 3, 4)
  variants: bool = True
  prefix_cache: bool = True
  most_states: int = 1 << 20

  def __post_init__(self):
    for name in self.policies:
      sched.find_policy(name)
    if not set(self.pages) <= set(KINDS):
      raise ValueError(f"pages={self.pages}: choose some of {', '.join(map(str, KINDS))}")
    if not all(1 <= budget <= 4 for budget in self.budgets):
      raise ValueError(f"budgets={self.budgets}: must be in [1, 4]")
    if not 1 <= self.rows <= 4:
      raise ValueError(f"rows={self.rows}: must be in [1, 4]")

  def settings(self) -> list[Setting]:
    """Those of one model follow each other."""
    return [
      Setting(pages=pages, budget=budget, rows=self.rows, **one)
      for one in self._kinds_of_search()
      for pages in self._pages_of(one)
      for budget in self.budgets
    ]

  def _pages_of(self, one: dict) -> tuple[int, ...]:
    """With a prefix cache a search costs much more: the smallest pool, but for the default."""
    if one.get("prefix_cache") and one["policy"] != "vllm_v1":
      return self.pages[:1]
    return self.pages if one.get("variant", "plain") == "plain" else self.pages[-1:]

  def _kinds_of_search(self) -> list[dict]:
    found: list[dict] = []
    for name in self.policies:
      found += [{"policy": name, "overlap": overlap} for overlap in (False, True)]
      found += _variants(name) if self.variants else []
    cached = [name for name in self.policies if not sched.find_policy(name).no_prefix_cache]
    for name in cached if self.prefix_cache else ():
      found.append({"policy": name, "prefix_cache": True})
      if name == "vllm_v1" and self.variants:
        found.append({"policy": name, "prefix_cache": True, "overlap": True})
    return found


def _variants(policy: str) -> list[dict]:
  names = {
    "vllm_v1": ("threshold", "unchunked", "watermark", "priority", "gate", "none", "await_host"),
    "sarathi": ("unchunked", "watermark"),
    "slo_aware": ("unchunked",),
    "bucket_shaped": ("unchunked",),
    "sglang": ("careless", "interval", "unchunked"),
    "sglang_mixed": ("careless", "interval", "unchunked"),
  }  # fmt: skip
  return [{"policy": policy, "variant": v, "overlap": True} for v in names.get(policy, ())]
