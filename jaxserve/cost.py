"""The arithmetic of chunked prefill: what a token, a chunk and a step cost, and which budget fits.

A prefill token pays for matrix multiplications, 2*P FLOPs, and attends to the keys before it; a
decode step pays for reading the weights and the resident KV once. A chunk that carries decodes pays
both sides of the roofline: FLOPs for its own tokens, bandwidth for the decoders' KV.

Everything here is plain arithmetic on Python numbers, and traces when given JAX arrays: sweep a
budget with `vmap`, differentiate a latency. Symbols in the formulas: P parameters, b bytes per
parameter, L layers, h query heads, h_kv KV heads, d head dim, k KV bytes per token, S prompt
tokens, c chunk tokens, pi FLOP/s, beta bytes/s. Units: tokens, bytes, FLOPs, seconds.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxserve.config import ModelConfig

Number = int | float | jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCost:
  """What the arithmetic needs to know about a model.

  Attributes:
    num_params: P, parameters that a token is multiplied with.
    num_layers: L.
    num_heads: h, query heads.
    num_kv_heads: h_kv, key-value heads.
    head_dim: d.
    bytes_per_param: b, bytes of one weight.
    kv_bytes: bytes of one element of the KV cache.
  """

  num_params: float
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  bytes_per_param: float = 2
  kv_bytes: float = 2

  def __post_init__(self) -> None:
    # Counted parameters are an int, and an int beyond 2^31 does not multiply a traced array.
    object.__setattr__(self, "num_params", float(self.num_params))

  @staticmethod
  def of(config: ModelConfig, bytes_per_param: float = 2, kv_bytes: float = 2) -> "ModelCost":
    """The cost model of a configured model."""
    return ModelCost(
      num_params=config.num_params,
      num_layers=config.num_layers,
      num_heads=config.num_heads,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
      bytes_per_param=bytes_per_param,
      kv_bytes=kv_bytes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
  """A device: what it achieves on real kernels, and what its data sheet says.

  Attributes:
    name: of the device.
    flops: pi, achieved FLOP/s in the model's dtype.
    bandwidth: beta, achieved bytes/s of memory.
    spec_flops: FLOP/s of the data sheet.
    spec_bandwidth: bytes/s of the data sheet.
  """

  name: str
  flops: float
  bandwidth: float
  spec_flops: float
  spec_bandwidth: float


LLAMA3_8B = ModelCost(
  num_params=8.03e9, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128
)  # fmt: skip
H100 = Hardware(
  name="H100 SXM", flops=500e12, bandwidth=2.6e12, spec_flops=989e12, spec_bandwidth=3.35e12
)


def _real(x: Number) -> Number:
  """A traced integer as a float, because the products overflow int32; other numbers as they are."""
  return x.astype(float) if isinstance(x, jax.Array) else x


def _larger(x: Number, y: Number) -> Number:
  traced = isinstance(x, jax.Array) or isinstance(y, jax.Array)
  return jnp.maximum(x, y) if traced else max(x, y)


def _smaller(x: Number, y: Number) -> Number:
  return -_larger(-x, -y)


def _whole_pages(tokens: Number, page_size: int, above: Number) -> Number:
  """`tokens` rounded down to a multiple of `page_size`; 0 unless that is more than `above`."""
  if isinstance(tokens, jax.Array):
    rounded = jnp.floor(tokens / page_size).astype(int) * page_size
    return jnp.where(rounded > above, rounded, 0)
  whole = math.floor(tokens / page_size) * page_size
  return whole if whole > above else 0


def weight_bytes(model: ModelCost) -> float:
  """Bytes of all weights: P*b."""
  return model.num_params * model.bytes_per_param


def kv_bytes_per_token(model: ModelCost) -> float:
  """Bytes of keys and values of one token in all layers: k = 2*L*h_kv*d*kv_bytes."""
  return 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.kv_bytes


def gemm_flops(model: ModelCost, tokens: Number) -> Number:
  """FLOPs of the weight multiplications of `tokens` tokens: 2*P*tokens."""
  return 2 * model.num_params * _real(tokens)


def attention_flops(model: ModelCost, chunk: Number, prefix: Number = 0) -> Number:
  """FLOPs of causal attention of `chunk` tokens after `prefix` others: 4*L*h*d*c*(prefix + c/2)."""
  c, mean_keys = _real(chunk), _real(prefix) + _real(chunk) / 2
  return 4.0 * model.num_layers * model.num_heads * model.head_dim * c * mean_keys


def prefill_flops(model: ModelCost, prompt: Number) -> Number:
  """FLOPs of a prompt of S tokens, however it is chunked: 2*P*S + 2*L*h*d*S^2."""
  return gemm_flops(model, prompt) + attention_flops(model, prompt)


def prefill_seconds(model: ModelCost, hardware: Hardware, prompt: Number) -> Number:
  """Seconds of a prompt in one unchunked step: prefill FLOPs / pi. Decoders stall that long."""
  return prefill_flops(model, prompt) / hardware.flops


def kv_seconds(model: ModelCost, hardware: Hardware, resident: Number) -> Number:
  """Seconds to read the KV of `resident` tokens once: resident*k / beta."""
  return kv_bytes_per_token(model) * _real(resident) / hardware.bandwidth


def decode_seconds(model: ModelCost, hardware: Hardware, rows: Number, context: Number) -> Number:
  """Seconds of a decode-only step: (P*b + rows*context*k) / beta.

  Args:
    model: of the weights.
    hardware: it runs on.
    rows: decoding requests.
    context: tokens cached by each of them.

  Returns:
    seconds.
  """
  resident = _real(rows) * _real(context)
  return weight_bytes(model) / hardware.bandwidth + kv_seconds(model, hardware, resident)


def chunk_seconds(
  model: ModelCost,
  hardware: Hardware,
  chunk: Number,
  prefix: Number,
  *,
  rows: Number = 0,
  resident: Number = 0,
) -> Number:
  """Seconds of a step with one chunk, and perhaps decodes riding along.

  [2*P*(c + rows) + 4*L*h*d*c*(prefix + c/2)]/pi + resident*k/beta. Below the ridge point, some 200
  tokens, reading the weights takes longer than the first term and stands for it: P*b/beta.

  Args:
    model: of the weights.
    hardware: it runs on.
    chunk: c, prompt tokens computed in this step.
    prefix: tokens of the same prompt computed before.
    rows: decodes riding along, each a row of the same matrix multiplications.
    resident: tokens cached by all those decoders together.

  Returns:
    seconds.
  """
  gemm = gemm_flops(model, _real(chunk) + _real(rows)) / hardware.flops
  weights = weight_bytes(model) / hardware.bandwidth
  attention = attention_flops(model, chunk, prefix) / hardware.flops
  return _larger(gemm, weights) + attention + kv_seconds(model, hardware, resident)


def step_terms(model: ModelCost, hardware: Hardware) -> dict[str, float]:
  """What the parts of a step take, in milliseconds: the model of `chunk_seconds` as four numbers.

  A scheduler that is to predict a step's time takes them as data (policy `slo_aware`), so they can
  be swept, or fitted to a machine that this file does not know.

  Returns:
    token_ms: matrix products of one token, 2*P/pi.
    weights_ms: reading the weights once, P*b/beta.
    pair_ms: attention of one query to one key, 4*L*h*d/pi.
    kv_ms: reading the KV of one resident token, k/beta.
  """
  return {
    "token_ms": 2e3 * model.num_params / hardware.flops,
    "weights_ms": 1e3 * weight_bytes(model) / hardware.bandwidth,
    "pair_ms": 4e3 * model.num_layers * model.num_heads * model.head_dim / hardware.flops,
    "kv_ms": 1e3 * kv_bytes_per_token(model) / hardware.bandwidth,
  }


def step_ms(terms: Mapping[str, Number], tokens: Number, pairs: Number, resident: Number) -> Number:
  """Milliseconds of a step of chunks and decodes: `chunk_seconds` for any number of chunks.

  max(token_ms*tokens, weights_ms) + pair_ms*pairs + kv_ms*resident. It never falls when a count
  grows, in float32 too, and is the same float32 however it is compiled: the maxima with zero keep
  a compiler from contracting a product and a sum into one rounding.

  Args:
    terms: see `step_terms`.
    tokens: of all rows.
    pairs: query-key pairs of the chunks, the sum of c*(prefix + c/2).
    resident: tokens cached by all decoders together.

  Returns:
    milliseconds, in the dtype of the counts.
  """
  gemm = _larger(terms["token_ms"] * tokens, terms["weights_ms"])
  attention = _larger(terms["pair_ms"] * pairs, 0.0)
  return gemm + attention + _larger(terms["kv_ms"] * resident, 0.0)


def num_chunks(prompt: Number, budget: Number, rows: Number = 0) -> Number:
  """Steps of a prompt when `rows` decodes draw from a budget first: ceil(S / (budget - rows))."""
  return -(-prompt // (budget - rows))


def last_chunk(prompt: Number, budget: Number, rows: Number = 0) -> Number:
  """Tokens of the last of those chunks."""
  return prompt - (num_chunks(prompt, budget, rows) - 1) * (budget - rows)


def riding_seconds(model: ModelCost, hardware: Hardware, rows: Number, context: Number) -> Number:
  """Seconds that decodes add to a chunk they ride in: 2*P*rows/pi + rows*context*k/beta.

  The chunk has paid for the weights, so this is less than `decode_seconds`.
  """
  resident = _real(rows) * _real(context)
  return gemm_flops(model, rows) / hardware.flops + kv_seconds(model, hardware, resident)


def prefill_slot_seconds(model: ModelCost, hardware: Hardware, chunk: Number = 2048) -> Number:
  """Seconds for one budget slot that a prefill token takes: a fresh chunk of c tokens, over c."""
  return chunk_seconds(model, hardware, chunk, 0) / _real(chunk)


def decode_slot_seconds(
  model: ModelCost, hardware: Hardware, rows: Number = 32, context: Number = 32768
) -> Number:
  """Seconds for one budget slot that a decode takes: a decode-only step of `rows`, over `rows`."""
  return decode_seconds(model, hardware, rows, context) / _real(rows)


def weight_reread_bytes(model: ModelCost, chunks: Number) -> Number:
  """Bytes of weights that N chunks read: N*P*b."""
  return _real(chunks) * weight_bytes(model)


def kv_reread_bytes(model: ModelCost, prompt: Number, chunks: Number) -> Number:
  """Bytes of their prompt's KV that N chunks read: the sum of k*j*c for j to N, about k*S*N/2."""
  return kv_bytes_per_token(model) * _real(prompt) * _real(chunks) / 2


def crossover_tokens(model: ModelCost) -> float:
  """Prompt length where chunks re-read as many bytes of KV as of weights: 2*P*b/k."""
  return 2 * weight_bytes(model) / kv_bytes_per_token(model)


def arithmetic_intensity(model: ModelCost, chunk: Number) -> Number:
  """FLOPs per byte of weights of a chunk: 2*c/b, which is c in bfloat16."""
  return 2 * _real(chunk) / model.bytes_per_param


def ridge_point(hardware: Hardware) -> float:
  """FLOPs per byte where compute and bandwidth balance: pi/beta. A smaller chunk wastes both."""
  return hardware.flops / hardware.bandwidth


def spec_ridge_point(hardware: Hardware) -> float:
  """The ridge point by the data sheet."""
  return hardware.spec_flops / hardware.spec_bandwidth


def budget_from_itl(
  model: ModelCost, hardware: Hardware, itl: Number, decode: Number, page_size: int = 1
) -> Number:
  """The budget whose weight multiplications fill the target, in whole pages.

  pi*(itl - decode)/(2*P). Attention is not counted, so a later chunk misses the target; see
  `worst_chunk_budget`.

  Args:
    model: of the weights.
    hardware: it runs on.
    itl: target for the inter-token gap, seconds.
    decode: seconds of a decode-only step.
    page_size: tokens a page; the result is a multiple of it.

  Returns:
    tokens; 0 if not one page fits.
  """
  tokens = hardware.flops * (_real(itl) - _real(decode)) / (2 * model.num_params)
  return _whole_pages(tokens, page_size, 0)


def _widest_chunk(a: float, b: Number, flops: Number) -> Number:
  """The root c of a/2*c^2 + b*c = flops, in a form without cancellation; 0 if flops < 0."""
  flops = _larger(flops, 0.0)
  return 2 * flops / _larger(b + (b * b + 2 * a * flops) ** 0.5, 1.0)


def worst_chunk_budget(
  model: ModelCost,
  hardware: Hardware,
  itl: Number,
  max_prefix: Number,
  *,
  rows: Number = 0,
  resident: Number = 0,
  page_size: int = 1,
) -> Number:
  """The largest budget whose most expensive full chunk, attention included, meets the target.

  Solves chunk_seconds(c, max_prefix) = itl for c: with a = 4*L*h*d and F the FLOPs that fit in
  itl - resident*k/beta, c is the smaller root of
    a/2*c^2 + (a*max_prefix + 2*P)*c = F - 2*P*rows     (the multiplications take the time)
    a/2*c^2 + a*max_prefix*c = F - pi*P*b/beta          (reading the weights does)

  Args:
    model: of the weights.
    hardware: it runs on.
    itl: target for the inter-token gap, seconds.
    max_prefix: longest prefix that a chunk may have to attend to, tokens.
    rows: decodes riding along; they take `rows` tokens of the budget.
    resident: tokens cached by all those decoders together.
    page_size: tokens a page; the result is a multiple of it.

  Returns:
    tokens, c + rows in whole pages; 0 if no budget leaves room for a chunk.
  """
  flops = hardware.flops * (_real(itl) - kv_seconds(model, hardware, resident))
  a = 4.0 * model.num_layers * model.num_heads * model.head_dim
  per_token = a * _real(max_prefix)
  computing = _widest_chunk(a, per_token + 2 * model.num_params, flops - gemm_flops(model, rows))
  reading = _widest_chunk(a, per_token, flops - ridge_point(hardware) * weight_bytes(model))
  return _whole_pages(_smaller(computing, reading) + _real(rows), page_size, rows)


def describe(
  budget: int,
  *,
  model: ModelCost = LLAMA3_8B,
  model_name: str = "Llama-3-8B",
  hardware: Hardware = H100,
  prompt: int = 32768,
  rows: int = 32,
  context: int = 2048,
) -> str:
  """One sentence: what a long prompt does to decoding requests with and without this budget.

  The steps' times include the decoders' rows of the matrix multiplications.
  """
  unchunked = prefill_seconds(model, hardware, prompt)
  case = (
    f"{model_name} on one {hardware.name}, {rows} requests decoding at {context:,} tokens of "
    f"context when a {prompt:,}-token prompt arrives: unchunked they stall for {unchunked:.2f} s"
  )
  if budget <= rows:
    return f"{case}; a budget of {budget:,} leaves nothing for a prompt beside {rows} decodes."
  chunk = min(budget - rows, prompt)
  starts = (0, (prompt // chunk - 1) * chunk)
  times = [
    f"{1e3 * chunk_seconds(model, hardware, chunk, at, rows=rows, resident=rows * context):.0f}"
    for at in starts
  ]
  steps = num_chunks(prompt, budget, rows)
  span = f"{steps} step{'s' * (steps > 1)} of {' to '.join(dict.fromkeys(times))}"
  alone = 1e3 * decode_seconds(model, hardware, rows, context)
  return (
    f"{case}; at a budget of {budget:,} the prompt takes {span} ms "
    f"(a step of decodes alone takes {alone:.1f} ms)."
  )
