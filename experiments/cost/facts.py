"""The arithmetic of one case as a table: every quantity with its formula, and its JSON values."""

import dataclasses

from jaxserve import cost, solve
from jaxserve.cost import Hardware, ModelCost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """One long prompt that arrives among decoders.

  Attributes:
    model: what is served.
    hardware: on what.
    prompt: S, tokens of the prompt.
    budget: tokens a step.
    target: what the budget is solved for: target, decoders, context, longest prefix, page size.
    limit: gap that a reader puts up with, seconds.
    slot_chunk: tokens of the fresh chunk that prices a prefill token.
    slot_context: context at which a decode token is priced.
    reread_prompt: prompt at which re-read KV is compared with re-read weights.
  """

  model: ModelCost
  hardware: Hardware
  prompt: int
  budget: int
  target: solve.Case
  limit: float
  slot_chunk: int
  slot_context: int
  reread_prompt: int

  def __post_init__(self):
    if self.budget <= self.target.decoders:
      raise ValueError(
        f"budget={self.budget}: leaves nothing for a prompt beside decoders="
        f"{self.target.decoders}; raise budget above that, or lower decoders"
      )

  @property
  def chunk(self):
    """c, tokens of a full chunk."""
    return min(self.budget - self.target.decoders, self.prompt)


@dataclasses.dataclass(frozen=True)
class Fact:
  """A line of the table.

  Attributes:
    name: of the quantity.
    formula: it comes from.
    shown: the value with its unit.
    values: what the JSON line says of it, unrounded.
  """

  name: str
  formula: str
  shown: str
  values: dict


def facts(setting):
  """All lines of the table, in order."""
  groups = (
    _memory, _prefill, _decode, _chunks, _riding, _slots, _reread, _ridge, _budgets
  )  # fmt: skip
  return [fact for group in groups for fact in group(setting)]


def _memory(s):
  weights, kv = cost.weight_bytes(s.model), cost.kv_bytes_per_token(s.model)
  yield Fact("weights", "P*b", f"{weights / 1e9:.2f} GB", {"weight_bytes": weights})
  yield Fact(
    "KV of a token, k", "2*L*h_kv*d*kv_bytes", f"{kv:,.0f} B", {"kv_bytes_per_token": round(kv, 3)}
  )


def _prefill(s):
  gemm = cost.gemm_flops(s.model, s.prompt) / 1e12
  attention = cost.attention_flops(s.model, s.prompt) / 1e12
  seconds = cost.prefill_seconds(s.model, s.hardware, s.prompt)
  yield Fact(
    f"prefill of {s.prompt:,} tokens",
    "2*P*S + 2*L*h*d*S^2",
    f"{gemm:,.1f} + {attention:,.1f} = {gemm + attention:,.1f} TFLOP",
    {"gemm_tflop": gemm, "attention_tflop": attention, "prefill_tflop": gemm + attention},
  )
  yield Fact("the same unchunked", "/ pi", f"{seconds:.3f} s", {"prefill_s": seconds})


def _decode(s):
  rows, context = s.target.decoders, s.target.context
  resident = cost.kv_bytes_per_token(s.model) * rows * context
  total = cost.weight_bytes(s.model) + resident
  decode = cost.decode_seconds(s.model, s.hardware, rows, context)
  prefill = cost.prefill_seconds(s.model, s.hardware, s.prompt)
  yield Fact(
    f"KV of {rows} decodes at {context:,}",
    "rows*context*k",
    f"{resident / 1e9:.2f} GB, with the weights {total / 1e9:.2f} GB",
    {"resident_kv_gb": resident / 1e9, "decode_gb": total / 1e9},
  )
  yield Fact(
    "a step of these decodes", "(P*b + rows*context*k) / beta", f"{1e3 * decode:.2f} ms",
    {"decode_ms": 1e3 * decode},
  )  # fmt: skip
  yield Fact(
    "spike of the inter-token gap",
    "unchunked / decode step",
    f"{prefill / decode:.0f}x; {prefill / s.limit:.0f}x over a limit of {1e3 * s.limit:g} ms",
    {"spike": prefill / decode, "spike_over_limit": prefill / s.limit},
  )


def _chunks(s):
  rows, chunk = s.target.decoders, s.chunk
  steps = cost.num_chunks(s.prompt, s.budget, rows)
  last = cost.last_chunk(s.prompt, s.budget, rows)
  kv = cost.kv_seconds(s.model, s.hardware, s.target.resident)
  yield Fact(
    f"chunks at a budget of {s.budget:,}",
    "ceil(S / (budget - rows))",
    f"{steps}, the last with {last:,} tokens",
    {"chunks": steps, "last_chunk_tokens": last},
  )
  for name, key, prefix in (
    ("first full chunk", "first_chunk_ms", 0),
    ("last full chunk", "last_full_chunk_ms", (s.prompt // chunk - 1) * chunk),
  ):
    time = cost.chunk_seconds(s.model, s.hardware, chunk, prefix, resident=s.target.resident)
    yield Fact(
      f"{name}, {chunk:,} after {prefix:,}",
      "[2*P*c + 4*L*h*d*c*(prefix + c/2)] / pi + rows*context*k / beta",
      f"{1e3 * time:.1f} ms",
      {key: 1e3 * time},
    )
  yield Fact(
    "decoders' KV over all chunks",
    "chunks * rows*context*k / beta",
    f"{steps} * {1e3 * kv:.1f} = {1e3 * steps * kv:.0f} ms, on top of the prefill's time",
    {"decoders_kv_ms": 1e3 * kv, "riding_decodes_ms": 1e3 * steps * kv},
  )


def _riding(s):
  rows, context = s.target.decoders, s.target.context
  kv = cost.kv_seconds(s.model, s.hardware, s.target.resident)
  riding = cost.riding_seconds(s.model, s.hardware, rows, context)
  saving = cost.decode_seconds(s.model, s.hardware, rows, context) / riding
  yield Fact(
    "these decodes riding in a chunk",
    "2*P*rows / pi + rows*context*k / beta",
    f"{1e3 * (riding - kv):.1f} + {1e3 * kv:.1f} = {1e3 * riding:.1f} ms, {saving:.1f}x cheaper",
    {
      "gemm_rows_ms": 1e3 * (riding - kv),
      "piggyback_ms": 1e3 * riding,
      "piggyback_saving": saving,
    },
  )


def _slots(s):
  prefill = cost.prefill_slot_seconds(s.model, s.hardware, s.slot_chunk)
  decode = cost.decode_slot_seconds(s.model, s.hardware, s.target.decoders, s.slot_context)
  yield Fact(
    "a budget slot: prefill token",
    f"a fresh chunk of {s.slot_chunk:,} alone / {s.slot_chunk:,}",
    f"{1e6 * prefill:.1f} us",
    {"prefill_slot_us": 1e6 * prefill},
  )
  yield Fact(
    f"a budget slot: decode at {s.slot_context:,}",
    f"a step of {s.target.decoders} decodes / {s.target.decoders}",
    f"{1e3 * decode:.2f} ms",
    {"decode_slot_ms": 1e3 * decode},
  )


def _reread(s):
  kv = cost.kv_reread_bytes(s.model, s.prompt, 1) / 1e9
  weights = cost.weight_reread_bytes(s.model, 1) / 1e9
  crossover = cost.crossover_tokens(s.model)
  share = s.reread_prompt / crossover
  yield Fact(
    "read again by each chunk",
    "k*S/2 and P*b",
    f"{kv:.2f} GB of KV, {weights:.2f} GB of weights",
    {"kv_reread_gb": kv, "weight_reread_gb": weights},
  )
  yield Fact(
    "prompt where both are equal",
    "2*P*b / k",
    f"{crossover:,.0f} tokens; at {s.reread_prompt:,} KV is {share:.0%}",
    {"crossover_tokens": crossover, "reread_share": share},
  )


def _ridge(s):
  spec, achieved = cost.spec_ridge_point(s.hardware), cost.ridge_point(s.hardware)
  floor = solve.ridge_tokens(s.model, s.hardware)
  yield Fact(
    "ridge point", "pi / beta", f"{spec:.0f} FLOP/B by specification, {achieved:.0f} achieved",
    {"ridge_spec": spec, "ridge_achieved": achieved},
  )  # fmt: skip
  yield Fact(
    "chunk that pays for its weights",
    "b/2 * pi / beta",
    f"{floor:.0f} tokens; a chunk of c tokens has {2 / s.model.bytes_per_param:g}*c FLOP/B",
    {"ridge_tokens": round(floor)},
  )


def _budgets(s):
  solution = solve.solve(s.model, s.hardware, s.target)
  exact = cost.budget_from_itl(s.model, s.hardware, s.target.itl, solution.decode)
  target = f"{1e3 * s.target.itl:g} ms"
  worst, more = 1e3 * solution.at_budget.itl, 1e3 * solution.at_next_page.itl
  yield Fact(
    f"budget for {target}, GEMM only",
    "pi*(ITL - decode) / (2*P), in whole pages",
    f"{exact:,} -> {solution.gemm_only:,} tokens",
    {"budget_exact": exact, "budget_gemm_only": solution.gemm_only},
  )
  shown = f"{solution.budget:,} tokens: {worst:.1f} ms, a page more {more:.1f} ms"
  if not solution.budget:
    shown = f"none: at least {1e3 * solution.lowest_itl:.1f} ms are needed"
  yield Fact(
    f"budget for {target}, worst chunk",
    "[2*P*B + 4*L*h*d*c*(max_prefix + c/2)] / pi + rows*context*k / beta <= ITL, c = B - rows",
    shown,
    {
      "budget_worst_chunk": solution.budget,
      "worst_chunk_ms": worst if solution.budget else None,
      "next_page_ms": more,
    },
  )
