"""Prompt lookup: what followed the last tokens of a request where they stood before.

Source: Saxena 2023, "Prompt Lookup Decoding"; as in vLLM's `ngram` the longest n-gram wins.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ngram:
  """How to look.

  Attributes:
    longest: most tokens that are looked for.
    shortest: fewest; a shorter agreement is taken for chance.
  """

  longest: int = 4
  shortest: int = 2

  def __post_init__(self) -> None:
    if self.shortest < 1:
      raise ValueError(f"shortest={self.shortest}: must be at least 1")
    if self.longest < self.shortest:
      raise ValueError(f"longest={self.longest}: must be at least shortest={self.shortest}")


def propose(
  histories: jax.Array, ends: jax.Array, count: int, how: Ngram
) -> tuple[jax.Array, jax.Array]:
  """Drafts that follow the latest earlier place of the longest n-gram at the end.

  Where that place is fewer than `count` tokens before the end, the text between them goes round.

  Args:
    histories: i32[B, L], tokens of each row by position; garbage from `ends` on.
    ends: i32[B], how many of them there are.
    count: static, most drafts of a row.
    how: static.

  Returns:
    (i32[B, count] tokens, i32[B] how many of them are meant: 0 or `count`).

  Cost: one pass over the histories with `how.longest` comparisons a token.
  """
  length = histories.shape[1]
  lane = jnp.arange(length, dtype=jnp.int32)
  agrees = (lane[None] < ends[:, None] - 1) & (ends[:, None] > 0)
  agreed = jnp.zeros_like(histories)
  for back in range(how.longest):
    tail = jnp.take_along_axis(histories, jnp.maximum(ends[:, None] - 1 - back, 0), axis=1)
    shifted = jnp.pad(histories, ((0, 0), (back, 0)))[:, :length]
    agrees &= (shifted == tail) & (lane[None] >= back) & (ends[:, None] > back)
    agreed += agrees.astype(jnp.int32)
  # The longest first, then the latest.
  score = jnp.max(jnp.where(agreed >= how.shortest, agreed * length + lane[None], -1), axis=1)
  place = jnp.where(score >= 0, score % length, 0)
  period = jnp.maximum(ends - 1 - place, 1)
  ahead = place[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)[None] % period[:, None]
  tokens = jnp.take_along_axis(histories, jnp.minimum(ahead, length - 1), axis=1)
  return tokens, jnp.where(score >= 0, count, 0)
