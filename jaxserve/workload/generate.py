"""Random arrivals and lengths. All randomness comes from the Generator that is passed in."""

from collections.abc import Sequence

import numpy as np


def _positive(**values: float) -> None:
  for name, value in values.items():
    if not 0 < value < float("inf"):
      raise ValueError(f"{name}={value}: must be a positive number")


def poisson_arrivals(rng: np.random.Generator, count: int, *, rate: float) -> np.ndarray:
  """f64[count] arrival times in seconds of a Poisson process of `rate` requests a second."""
  return gamma_arrivals(rng, count, rate=rate, cv=1.0)


def gamma_arrivals(
  rng: np.random.Generator, count: int, *, rate: float, cv: float
) -> np.ndarray:  # fmt: skip
  """Arrival times whose gaps are gamma distributed.

  Gaps have shape 1/cv^2 and scale cv^2/rate: mean 1/rate, standard deviation cv/rate.

  Args:
    rng: source of the randomness.
    count: requests.
    rate: requests a second.
    cv: coefficient of variation of the gaps; 1 is a Poisson process, above 1 comes in bursts.

  Returns:
    f64[count], seconds; the first is one gap after 0.

  Source: DistServe and vLLM's serving benchmark (`--burstiness` is 1/cv^2).
  """
  _positive(rate=rate, cv=cv)
  return np.cumsum(rng.gamma(1 / cv**2, cv**2 / rate, size=count))


def fixed(count: int, tokens: int) -> np.ndarray:
  """i32[count]: the same length for all."""
  _positive(tokens=tokens)
  return np.full(count, tokens, np.int32)


def uniform(rng: np.random.Generator, count: int, *, low: int, high: int) -> np.ndarray:
  """i32[count] in [low, high], both included."""
  if not 1 <= low <= high:
    raise ValueError(f"low={low}, high={high}: need 1 <= low <= high")
  return rng.integers(low, high, size=count, endpoint=True, dtype=np.int32)


def lognormal(
  rng: np.random.Generator, count: int, *, median: float, sigma: float, low: int = 1, high: int
) -> np.ndarray:
  """Lengths whose logarithm is normal, rounded and clipped.

  Args:
    rng: source of the randomness.
    count: requests.
    median: tokens.
    sigma: standard deviation of the natural logarithm.
    low: shortest, in tokens.
    high: longest, in tokens.

  Returns:
    i32[count].
  """
  _positive(median=median, sigma=sigma)
  if not 1 <= low <= high:
    raise ValueError(f"low={low}, high={high}: need 1 <= low <= high")
  tokens = median * np.exp(sigma * rng.standard_normal(count))
  return np.clip(np.rint(tokens), low, high).astype(np.int32)


def histogram(
  rng: np.random.Generator, count: int, *, edges: Sequence[int], counts: Sequence[float]
) -> np.ndarray:
  """Lengths from an empirical histogram, uniform within a bin.

  Args:
    rng: source of the randomness.
    count: requests.
    edges: k + 1 rising token counts; bin i holds [edges[i], edges[i + 1]); the first at least 1.
    counts: k weights, not all 0.

  Returns:
    i32[count].
  """
  low, weights = np.asarray(edges, np.int64), np.asarray(counts, np.float64)
  if len(low) != len(weights) + 1 or (np.diff(low) < 1).any() or low[0] < 1:
    raise ValueError(
      f"edges={list(edges)}: need {len(weights) + 1} rising token counts from 1 on, one more than "
      "counts"
    )
  if (weights < 0).any() or not 0 < weights.sum() < float("inf"):
    raise ValueError(f"counts={list(counts)}: must not be negative nor all 0")
  chosen = rng.choice(len(weights), size=count, p=weights / weights.sum())
  return rng.integers(low[:-1][chosen], low[1:][chosen]).astype(np.int32)
