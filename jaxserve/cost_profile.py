"""The cost model with measured numbers: what a step of one engine takes on one machine.

A profile is seven costs, each of something physical and none negative, fitted to step times that
were measured over many kinds of steps (`python -m experiments.calibrate`). Simulator, solver and
the policy `slo_aware` take it in the place of figures from a data sheet. Pure: files are read and
written by `jaxserve.engine.profiles`.

  seconds = step_s + max(token_s * T, weights_s) + pair_s * pairs + kv_s * resident
            + row_s * decodes + head_row_s * head rows

T is the token bucket, padding included: that is what an executable computes.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.cost import Hardware, ModelCost, Number

VERSION = 1
FORMAT = "jaxserve profile"
_LEAST_S = 1e-12  # of a token: a model without a cost per token has no rate
_ROUNDS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWork:
  """What one step computes.

  Attributes:
    bucket: tokens, padding included.
    pairs: query-key pairs of the chunks, the sum of c*(prefix + c/2).
    resident: tokens cached by all decodes together.
    decodes: decode rows.
    head_rows: rows of the head, padding included; 0 if nothing samples.
    chunks: prompts that a chunk is computed of.
  """

  bucket: Number
  pairs: Number
  resident: Number
  decodes: Number
  head_rows: Number
  chunks: int = 0

  @staticmethod
  def of(
    rows: Iterable[tuple[int, int, bool]], *, bucket: int, samples: bool,
    row_buckets: Sequence[int],
  ) -> "StepWork":  # fmt: skip
    """From rows of (tokens, tokens before them, whether it is a decode)."""
    rows = list(rows)
    chunks = [(tokens, prefix) for tokens, prefix, decodes in rows if not decodes]
    contexts = [prefix for _, prefix, decodes in rows if decodes]
    head = next((size for size in row_buckets if size >= len(rows)), len(rows))
    return StepWork(
      bucket=bucket,
      pairs=sum(tokens * (prefix + tokens / 2) for tokens, prefix in chunks),
      resident=sum(contexts),
      decodes=len(contexts),
      head_rows=head if samples else 0,
      chunks=len(chunks),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
  """What makes up the time of a step, in seconds.

  Attributes:
    step_s: of every step: launches, the host's part.
    token_s: of one token of the bucket: its matrix products and all else that is by token.
    weights_s: least time of all products of a step: reading the weights once.
    pair_s: of one query of a chunk attending to one key.
    kv_s: of one cached token that a decode attends to.
    row_s: of one decode besides its keys.
    head_row_s: of one row of the head and the sampler.
  """

  step_s: float
  token_s: float
  weights_s: float
  pair_s: float
  kv_s: float
  row_s: float
  head_row_s: float

  def seconds(self, work: StepWork) -> Number:
    """Time of a step; traces where the work does."""
    traced = not isinstance(work.bucket, int | float)
    products = self.token_s * work.bucket
    base = jnp.maximum(products, self.weights_s) if traced else max(products, self.weights_s)
    return (
      self.step_s + base + self.pair_s * work.pairs + self.kv_s * work.resident
      + self.row_s * work.decodes + self.head_row_s * work.head_rows
    )  # fmt: skip


COSTS = tuple(field.name for field in dataclasses.fields(StepCosts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
  """What was measured, on what.

  Attributes:
    model: name of the model.
    device: that it ran on.
    dtype: of weights, products and KV.
    num_params: parameters that a token is multiplied with.
    row_buckets: row counts of the head, rising; the last is the number of seats.
    costs: that were fitted.
  """

  model: str
  device: str
  dtype: str
  num_params: int
  row_buckets: tuple[int, ...]
  costs: StepCosts

  def overhead_s(self, decodes: int | None = None) -> float:
    """Seconds of a step beyond products and attention, with so many decodes; None: all seats."""
    decodes = self.row_buckets[-1] if decodes is None else decodes
    head = next((size for size in self.row_buckets if size >= decodes), decodes)
    c = self.costs
    return c.step_s + c.row_s * decodes + c.head_row_s * head

  def step_terms(self) -> dict[str, float]:
    """As `cost.step_terms`, in milliseconds; what they leave out is `overhead_s`."""
    c = self.costs
    return {
      "token_ms": 1e3 * c.token_s, "weights_ms": 1e3 * c.weights_s, "pair_ms": 1e3 * c.pair_s,
      "kv_ms": 1e3 * c.kv_s,
    }  # fmt: skip

  def as_hardware(self) -> tuple[ModelCost, Hardware]:
    """A model and a device by whose arithmetic every term of a step is the measured one.

    The rates are those that the products and the weights were seen to reach. Attention has rates
    of its own, so heads and bytes of the KV are scaled until it takes what was measured.
    """
    c, width = self.costs, 2 if self.dtype == "bfloat16" else 4
    flops = 2 * self.num_params / c.token_s
    bandwidth = self.num_params * width / max(c.weights_s, c.token_s)
    model = ModelCost(
      num_params=self.num_params, num_layers=1, num_kv_heads=1, head_dim=1,
      num_heads=c.pair_s * flops / 4,  # type: ignore[arg-type]
      bytes_per_param=width, kv_bytes=c.kv_s * bandwidth / 2,
    )  # fmt: skip
    name = f"{self.device}, measured with {self.model}"
    return model, Hardware(
      name=name, flops=flops, bandwidth=bandwidth, spec_flops=flops, spec_bandwidth=bandwidth
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
  """Costs, and how well they explain what was measured.

  Attributes:
    costs: all of them from 0 on.
    errors: f64[n], predicted over measured, minus one.
  """

  costs: StepCosts
  errors: np.ndarray

  def quality(self) -> dict[str, float]:
    """Median, 90th percentile and largest of the errors' sizes, and their mean."""
    size = np.abs(self.errors)
    return {
      "median": float(np.median(size)),
      "p90": float(np.percentile(size, 90)),
      "max": float(size.max()),
      "bias": float(self.errors.mean()),
    }


def fit(works: Sequence[StepWork], seconds: Sequence[float]) -> Fit:
  """The costs that explain measured steps best, by relative error.

  The bucket where products begin to take longer than reading the weights is searched among the
  buckets that were seen; for each the rest is a least-squares problem over costs from 0 on. Large
  errors count by their size, not its square (iterated weights), because some steps of a busy
  machine take twice as long as the others.

  Args:
    works: what the steps computed, n of them.
    seconds: what each took.

  Returns:
    Fit.

  Raises:
    ValueError: fewer steps than costs, or a time that is not positive.
  """
  if len(works) != len(seconds) or len(works) < len(COSTS):
    raise ValueError(
      f"steps={len(works)}: at least {len(COSTS)} measured steps are needed for as many costs"
    )
  times = np.asarray(seconds, np.float64)
  if not (np.isfinite(times) & (times > 0)).all():
    raise ValueError("seconds: every measured time must be a positive number")
  ridges = sorted({int(work.bucket) for work in works})
  ridges = ridges[:-1] or ridges  # above the last there would be nothing that shows a token's cost
  best = min((_fit_ridge(works, times, ridge) for ridge in ridges), key=_loss)
  return best


def _loss(found: Fit) -> float:
  return float(np.abs(found.errors).sum())


def _fit_ridge(works: Sequence[StepWork], times: np.ndarray, ridge: int) -> Fit:
  columns = np.array([
    [1, max(w.bucket, ridge), w.pairs, w.resident, w.decodes, w.head_rows] for w in works
  ], np.float64)  # fmt: skip
  relative = columns / times[:, None]
  scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
  weights = np.ones(len(times))
  for _ in range(_ROUNDS):
    root = np.sqrt(weights)
    x = _least_squares(relative / scale * root[:, None], root)
    errors = relative / scale @ x - 1
    weights = 1 / np.maximum(np.abs(errors), 0.02)
  step, token, pair, kv, row, head = x / scale
  token = max(token, _LEAST_S)
  costs = StepCosts(
    step_s=float(step), token_s=float(token), weights_s=float(token * ridge), pair_s=float(pair),
    kv_s=float(kv), row_s=float(row), head_row_s=float(head),
  )  # fmt: skip
  return Fit(costs=costs, errors=errors)


def _least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """x >= 0 that minimises |a x - b|, exactly: the best of all subsets of columns, 63 for six."""
  best, least = np.zeros(a.shape[1]), math.inf
  for size in range(1, a.shape[1] + 1):
    for chosen in itertools.combinations(range(a.shape[1]), size):
      part = a[:, chosen]
      x = np.linalg.lstsq(part, b, rcond=None)[0]
      loss = float(np.sum((part @ x - b) ** 2))
      if (x >= 0).all() and loss < least * (1 - 1e-12):
        best, least = np.zeros(a.shape[1]), loss
        best[list(chosen)] = x
  return best


def to_document(profile: Profile, **also: Any) -> dict[str, Any]:
  """A profile as plain data for a JSON file.

  Args:
    profile: what was measured.
    **also: more that a reader may want to know, under names of its own.
  """
  return {"format": FORMAT, "version": VERSION} | dataclasses.asdict(profile) | also


def from_document(document: Any) -> Profile:
  """The profile of `to_document`; what it does not know is ignored.

  Raises:
    ValueError: something is missing or wrong; the message names the field and the remedy.
  """
  again = "run `python -m experiments.calibrate` again"
  if not isinstance(document, Mapping) or document.get("format") != FORMAT:
    raise ValueError(f'format: must be "{FORMAT}"; give a file that experiments.calibrate wrote')
  if document.get("version") != VERSION:
    raise ValueError(
      f"version={document.get('version')!r}: this release reads version {VERSION}; {again}"
    )
  rows = document.get("row_buckets")
  if not isinstance(rows, list | tuple) or not rows:
    raise ValueError(f"row_buckets={rows!r}: must be a list of row counts; {again}")
  buckets = tuple(_whole(size, "row_buckets", again) for size in rows)
  if list(buckets) != sorted(set(buckets)):
    raise ValueError(f"row_buckets={rows!r}: must rise; {again}")
  costs = document.get("costs")
  if not isinstance(costs, Mapping):
    raise ValueError(f"costs={costs!r}: must be an object with {', '.join(COSTS)}; {again}")
  found = StepCosts(**{key: _cost(costs.get(key), key, again) for key in COSTS})
  return Profile(
    model=_text(document, "model", again),
    device=_text(document, "device", again),
    dtype=_text(document, "dtype", again),
    num_params=_whole(document.get("num_params"), "num_params", again),
    row_buckets=buckets,
    costs=found,
  )


def _text(document: Mapping[str, Any], key: str, again: str) -> str:
  value = document.get(key)
  if not isinstance(value, str) or not value:
    raise ValueError(f"{key}={value!r}: must be a name; {again}")
  return value


def _whole(value: Any, key: str, again: str) -> int:
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise ValueError(f"{key}={value!r}: must be a whole number of at least 1; {again}")
  return value


def _cost(value: Any, key: str, again: str) -> float:
  good = isinstance(value, int | float) and not isinstance(value, bool)
  if not good or not 0 <= value < math.inf or (key == "token_s" and value == 0):
    least = "a positive number" if key == "token_s" else "a number from 0 on"
    raise ValueError(f"costs.{key}={value!r}: must be {least}, in seconds; {again}")
  return float(value)
