"""How good drafts were: what was drafted, what was accepted, and at which place of a draft."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
  """Drafts of some steps. Its sum with another is that of both.

  Attributes:
    decodes: times that a request decoded in a step, with or without drafts.
    drafts: times with drafts.
    draft_tokens: drafts that were verified.
    accepted_by_position: how often the first, second, ... draft was accepted.
  """

  decodes: int = 0
  drafts: int = 0
  draft_tokens: int = 0
  accepted_by_position: tuple[int, ...] = ()

  @staticmethod
  def of(decodes: Iterable[tuple[int, int]]) -> "Acceptance":
    """From (drafts, accepted) of every request that decoded in a step, for each step."""
    pairs = list(decodes)
    longest = max((accepted for _, accepted in pairs), default=0)
    return Acceptance(
      decodes=len(pairs),
      drafts=sum(drafts > 0 for drafts, _ in pairs),
      draft_tokens=sum(drafts for drafts, _ in pairs),
      accepted_by_position=tuple(
        sum(accepted > place for _, accepted in pairs) for place in range(longest)
      ),
    )

  def __add__(self, other: "Acceptance") -> "Acceptance":
    pairs = itertools.zip_longest(
      self.accepted_by_position, other.accepted_by_position, fillvalue=0
    )
    return Acceptance(
      decodes=self.decodes + other.decodes,
      drafts=self.drafts + other.drafts,
      draft_tokens=self.draft_tokens + other.draft_tokens,
      accepted_by_position=tuple(a + b for a, b in pairs),
    )

  @property
  def accepted_tokens(self) -> int:
    """Drafts that the model found right."""
    return sum(self.accepted_by_position)

  @property
  def rate(self) -> float | None:
    """Accepted of those verified; None without any."""
    return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

  @property
  def tokens_per_step(self) -> float | None:
    """Outputs of a request in a step in which it decodes: 1 without speculation."""
    return 1 + self.accepted_tokens / self.decodes if self.decodes else None

  def summary(self) -> dict[str, Any]:
    """Plain numbers for a report."""
    return {
      "draft_tokens": self.draft_tokens,
      "accepted_tokens": self.accepted_tokens,
      "acceptance_rate": self.rate,
      "accepted_by_position": list(self.accepted_by_position),
      "decode_tokens_per_step": self.tokens_per_step,
    }
