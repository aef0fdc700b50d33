"""The budget for an inter-token target, from the arithmetic of `jaxserve.cost`.

A target for the inter-token gap (ITL) bounds the longest step. Two answers are given. The GEMM-only
budget counts the weight multiplications of a chunk and nothing else; it is the usual rule of thumb,
and later chunks of a long prompt miss the target. The worst-chunk budget is the largest whose most
expensive full chunk, attention over the longest prefix included, still meets the target.

Plain numbers give plain numbers; with traced fields of `Case` everything traces: `vmap` over
targets, prefixes, decoders. Units: seconds, tokens. Nothing here reads a clock.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve import cost
from jaxserve.cost import Hardware, ModelCost, Number
from jaxserve.pytree import pytree_dataclass

BINDINGS = (
  "compute", "attention", "decoder_kv", "weight_stream", "ridge_floor", "infeasible",
)  # fmt: skip
"""What decides the worst-chunk budget; `Solution.binding` is an index into it.

compute: the weight multiplications of the chunk and the decodes take the most of its time.
attention: attention of the chunk to the prefix does.
decoder_kv: reading the KV of the decodes does.
weight_stream: reading the weights does, in a chunk below the ridge point.
ridge_floor: so it does, and the budget is the last below the ridge point: the chunk rides on the
  weight stream for nothing, and one page more would have to be paid for.
infeasible: no budget meets the target.
"""


def _traced(*values: Any) -> bool:
  return any(isinstance(value, jax.Array) for value in values)


def _real(x: Number) -> Number:
  return x.astype(float) if isinstance(x, jax.Array) else x


def _where(condition: Any, yes: Any, no: Any) -> Any:
  """`jnp.where` if anything is traced; else a choice."""
  if _traced(condition, yes, no):
    return jnp.where(condition, yes, no)
  return yes if condition else no


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """What the budget is solved for. Fields but page_size may be traced.

  Attributes:
    itl: target for the gap between two tokens of a stream, seconds.
    decoders: requests that decode beside the prompt; they draw from the budget first.
    context: tokens cached by each of them.
    max_prefix: longest prefix that a chunk may have to attend to, tokens.
    page_size: tokens a page; budgets are multiples of it.
    overhead: seconds that every step takes besides products, attention and KV.

  Raises:
    ValueError: a field is out of range; the message names it, its value and what is allowed.
  """

  itl: Number
  decoders: Number
  context: Number
  max_prefix: Number
  page_size: int = 1
  overhead: Number = 0.0

  def __post_init__(self) -> None:
    if not _traced(self.itl) and not 0 < self.itl < math.inf:
      raise ValueError(f"itl={self.itl!r}: must be a positive number of seconds")
    if not _traced(self.overhead) and not 0 <= self.overhead < math.inf:
      raise ValueError(f"overhead={self.overhead!r}: must be a number of seconds from 0 on")
    for field, least in (("decoders", 1), ("context", 0), ("max_prefix", 1), ("page_size", 1)):
      value = getattr(self, field)
      if not _traced(value) and value < least:
        raise ValueError(f"{field}={value!r}: must be at least {least}")

  @property
  def resident(self) -> Number:
    """Tokens cached by all decoders together."""
    return _real(self.decoders) * _real(self.context)


@pytree_dataclass
class Terms:
  """Seconds of the parts of the most expensive full chunk.

  The step takes the larger of `compute` and `weight_stream`, plus the other two, plus the case's
  `overhead`.

  Attributes:
    compute: weight multiplications of the chunk and the decodes.
    attention: of the chunk, to itself and the longest prefix.
    decoder_kv: reading the KV of the decodes.
    weight_stream: reading the weights.
  """

  compute: Number
  attention: Number
  decoder_kv: Number
  weight_stream: Number


@pytree_dataclass
class Prediction:
  """What a budget does to the decoders and to one prompt of max_prefix tokens.

  Attributes:
    budget: tokens a step.
    itl: longest gap, seconds: a full chunk after the longest prefix.
    first_itl: gap while the first full chunk is computed, seconds.
    steps: chunks of the prompt; inf if the budget leaves no room for it.
    ttft: seconds from the first chunk to the prompt's first token; inf as above.
    prefill_throughput: prompt tokens/s meanwhile.
    output_throughput: tokens/s of all decoders together meanwhile.
  """

  budget: Number
  itl: Number
  first_itl: Number
  steps: Number
  ttft: Number
  prefill_throughput: Number
  output_throughput: Number


@pytree_dataclass
class Solution:
  """The answer. A pytree of numbers: a vmapped `solve` gives one with arrays.

  Attributes:
    budget: worst-chunk budget, whole pages; 0 if nothing meets the target.
    gemm_only: GEMM-only budget, whole pages; 0 if not one page fits.
    ridge_tokens: tokens below which a step takes as long as reading the weights: b/2 * pi/beta.
    decode: seconds of a step of the decodes alone.
    lowest_itl: lowest target that any budget meets, seconds: that of the first page that leaves
      room for a chunk.
    binding: index into `BINDINGS`.
    terms: parts of the worst chunk at `budget`, or at the smallest budget if that is 0.
    at_budget: prediction for `budget`.
    at_next_page: prediction for one page more, which misses the target.
    at_gemm_only: prediction for `gemm_only`.
  """

  budget: Number
  gemm_only: Number
  ridge_tokens: Number
  decode: Number
  lowest_itl: Number
  binding: Number
  terms: Terms
  at_budget: Prediction
  at_next_page: Prediction
  at_gemm_only: Prediction

  @property
  def binding_name(self) -> str:
    """The binding constraint by name; not under a trace."""
    return BINDINGS[int(self.binding)]


def ridge_tokens(model: ModelCost, hardware: Hardware) -> float:
  """Tokens whose weight multiplications take as long as reading the weights: b/2 * pi/beta.

  The ridge point of the roofline model (Williams et al., 2009) in tokens; 192 for the reference
  case. A step below it takes as long as one of this size.
  """
  return cost.ridge_point(hardware) * model.bytes_per_param / 2


def smallest_budget(case: Case) -> Number:
  """The first multiple of the page that exceeds the decodes, so that a chunk fits beside them."""
  return (case.decoders // case.page_size + 1) * case.page_size


def terms(model: ModelCost, hardware: Hardware, case: Case, budget: Number) -> Terms:
  """The parts of the worst full chunk of a budget: c = budget - decoders after max_prefix tokens.

  Args:
    model: of the weights.
    hardware: it runs on.
    case: decoders, context and longest prefix.
    budget: tokens, more than `case.decoders`.

  Returns:
    seconds of each part.
  """
  chunk = budget - case.decoders
  return Terms(
    compute=cost.gemm_flops(model, budget) / hardware.flops,
    attention=cost.attention_flops(model, chunk, case.max_prefix) / hardware.flops,
    decoder_kv=cost.kv_seconds(model, hardware, case.resident),
    weight_stream=cost.weight_bytes(model) / hardware.bandwidth,
  )


def predict(model: ModelCost, hardware: Hardware, case: Case, budget: Number) -> Prediction:
  """What a budget does, meets it the target or not.

  The prompt is cut into N = ceil(S/c) chunks of c = budget - decoders tokens, the last one smaller.
  FLOPs of attention do not depend on the cut; every step reads the decoders' KV, and the weights at
  least. The decoders' contexts are held constant meanwhile.

  Args:
    model: of the weights.
    hardware: it runs on.
    case: decoders and context, and max_prefix: S, tokens of the prompt.
    budget: tokens a step. At most the decoders, and the prompt never advances.

  Returns:
    the prediction.
  """
  rows, prompt = case.decoders, case.max_prefix
  advances = budget > rows
  chunk = _where(advances, budget - rows, 1)
  riding = {"rows": rows, "resident": case.resident}
  alone = cost.decode_seconds(model, hardware, rows, case.context) + case.overhead

  def step(tokens: Number, prefix: Number) -> Number:
    return cost.chunk_seconds(model, hardware, tokens, prefix, **riding) + case.overhead

  def without_attention(tokens: Number) -> Number:
    return step(tokens, 0) - cost.attention_flops(model, tokens) / hardware.flops

  steps = _real(-(-prompt // chunk))
  rest = _real(prompt) - (steps - 1) * _real(chunk)
  attention = cost.attention_flops(model, prompt) / hardware.flops
  ttft = (steps - 1) * without_attention(chunk) + without_attention(rest) + attention
  return Prediction(
    budget=budget,
    itl=_where(advances, step(chunk, prompt), alone),
    first_itl=_where(advances, step(chunk, 0), alone),
    steps=_where(advances, steps, math.inf),
    ttft=_where(advances, ttft, math.inf),
    prefill_throughput=_where(advances, _real(prompt) / ttft, 0.0),
    output_throughput=_where(advances, _real(rows) * steps / ttft, _real(rows) / alone),
  )


def binding(
  model: ModelCost, hardware: Hardware, case: Case, budget: Number, parts: Terms
) -> Number:
  """What decides a budget: the largest part of its worst chunk.

  Args:
    model: of the weights.
    hardware: it runs on.
    case: with the page size.
    budget: the worst-chunk budget; 0 is infeasible.
    parts: of its worst chunk.

  Returns:
    index into `BINDINGS`.
  """
  ridge = ridge_tokens(model, hardware)
  tokens = _real(budget)
  on_floor = (tokens <= ridge) & (tokens + case.page_size > ridge)
  streaming = parts.weight_stream > parts.compute
  base = _where(streaming, parts.weight_stream, parts.compute)
  stream = _where(on_floor, BINDINGS.index("ridge_floor"), BINDINGS.index("weight_stream"))
  code = _where(streaming, stream, BINDINGS.index("compute"))
  kv_wins = (parts.decoder_kv > base) & (parts.decoder_kv >= parts.attention)
  attention_wins = (parts.attention > base) & (parts.attention > parts.decoder_kv)
  code = _where(kv_wins, BINDINGS.index("decoder_kv"), code)
  code = _where(attention_wins, BINDINGS.index("attention"), code)
  return _where(budget > 0, code, BINDINGS.index("infeasible"))


def solve(model: ModelCost, hardware: Hardware, case: Case) -> Solution:
  """Finds both budgets, what binds, and what they do. Constant work; no search.

  The worst-chunk budget is the root of a quadratic, see `cost.worst_chunk_budget`; the GEMM-only
  budget is pi*(itl - decode)/(2*P), see `cost.budget_from_itl`.

  Args:
    model: of the weights.
    hardware: it runs on.
    case: target, decoders, context, longest prefix, page size.

  Returns:
    the solution; its budget is 0 if no budget meets the target (`explain.check_feasible` raises).
  """
  page = case.page_size
  decode = cost.decode_seconds(model, hardware, case.decoders, case.context) + case.overhead
  least = smallest_budget(case)
  gemm_only = cost.budget_from_itl(model, hardware, case.itl, decode, page)
  budget = cost.worst_chunk_budget(
    model, hardware, case.itl - case.overhead, case.max_prefix,
    rows=case.decoders, resident=case.resident, page_size=page,
  )  # fmt: skip
  feasible = budget > 0
  parts = terms(model, hardware, case, _where(feasible, budget, least))
  return Solution(
    budget=budget,
    gemm_only=gemm_only,
    ridge_tokens=ridge_tokens(model, hardware),
    decode=decode,
    lowest_itl=predict(model, hardware, case, least).itl,
    binding=binding(model, hardware, case, budget, parts),
    terms=parts,
    at_budget=predict(model, hardware, case, budget),
    at_next_page=predict(model, hardware, case, _where(feasible, budget + page, least)),
    at_gemm_only=predict(model, hardware, case, gemm_only),
  )
