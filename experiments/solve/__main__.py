"""The token budget for a latency target: `python -m experiments.solve --itl_ms 60`.

Prints the budget whose most expensive full chunk keeps the target, why it is not larger, and what
it does to the inter-token gap (ITL), to the time to the first token (TTFT) of a prompt of
--max_prefix tokens, and to throughput; beside it one page more, and the budget of the GEMM-only
rule. Writes itl.svg under --out. The last line is one JSON document. Exits with 2 if no budget
keeps the target.
"""

import json
import math
import pathlib
import sys

from absl import app, flags

from experiments import case
from experiments.solve import chart
from jaxserve import solve

FLAGS = flags.FLAGS
_MODEL = flags.DEFINE_string("model", "llama3-8b", "A name of the table, or a config.json's path.")
_HARDWARE = flags.DEFINE_string("hardware", "h100", "h100, h200, a100, l40s, b200, or this.")
_BYTES = flags.DEFINE_float(
  "bytes_per_param", None, "Bytes of a weight. Default: 2.", lower_bound=0.25
)
_KV_BYTES = flags.DEFINE_float(
  "kv_bytes", 2.0, "Bytes of an element of the KV cache.", lower_bound=0.25
)
_ITL_MS = flags.DEFINE_float("itl_ms", 60.0, "Target of the inter-token gap.")
_DECODERS = flags.DEFINE_integer("decoders", 32, "Requests that decode beside the prompt.")
_CONTEXT = flags.DEFINE_integer("context", 2048, "Tokens cached by each of them.")
_MAX_PREFIX = flags.DEFINE_integer("max_prefix", 32768, "Longest prefix that a chunk attends to.")
_PAGE = flags.DEFINE_integer("page", 64, "Tokens of a KV page; budgets are whole pages.")
_PROFILE = flags.DEFINE_string(
  "profile", None, "Measured costs of experiments.calibrate, in the place of model and hardware."
)
_OUT = flags.DEFINE_string("out", "runs/solve", "Folder of the plot; '' for none.")


def target(profile):
  overhead = 0.0 if profile is None else profile.overhead_s(_DECODERS.value)
  return solve.Case(
    overhead=overhead,
    itl=case.milliseconds("itl_ms", _ITL_MS.value),
    decoders=_DECODERS.value,
    context=_CONTEXT.value,
    max_prefix=_MAX_PREFIX.value,
    page_size=case.at_least("page", _PAGE.value, 1),
  )


def table(solution):
  """What the three budgets do, a line each."""
  rows = [
    ("", "budget", "worst ITL", "first ITL", "chunks", "TTFT", "prompt tok/s", "output tok/s")
  ]
  for name, p in (
    ("worst chunk", solution.at_budget),
    ("one page more", solution.at_next_page),
    ("GEMM only", solution.at_gemm_only),
  ):
    rows.append((
      name, f"{p.budget:,}", f"{1e3 * p.itl:.1f} ms", f"{1e3 * p.first_itl:.1f} ms",
      f"{p.steps:,}", f"{p.ttft:.2f} s", f"{p.prefill_throughput:,.0f}",
      f"{p.output_throughput:,.0f}",
    ))  # fmt: skip
  return "\n".join(f"{row[0]:14}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows)


def document(name, question, solution, device):
  """The JSON line. Times in ms but TTFT, which is in seconds."""

  def predicted(p):
    values = {
      "budget": p.budget, "itl_ms": 1e3 * p.itl, "first_itl_ms": 1e3 * p.first_itl,
      "chunks": p.steps, "ttft_s": p.ttft, "prefill_tokens_per_s": p.prefill_throughput,
      "output_tokens_per_s": p.output_throughput,
    }  # fmt: skip
    return {key: value if math.isfinite(value) else None for key, value in values.items()}

  return {
    "model": name,
    "hardware": device.hardware.name,
    "itl_ms": 1e3 * question.itl,
    "budget_gemm_only": solution.gemm_only,
    "budget_worst_chunk": solution.budget,
    "ridge_tokens": round(solution.ridge_tokens),
    "binding": solution.binding_name,
    "decode_ms": 1e3 * solution.decode,
    "lowest_itl_ms": 1e3 * solution.lowest_itl,
    "terms_ms": {name: 1e3 * value for name, value in vars(solution.terms).items()},
    "at_worst_chunk": predicted(solution.at_budget),
    "at_next_page": predicted(solution.at_next_page),
    "at_gemm_only": predicted(solution.at_gemm_only),
  }


def run(argv):
  case.no_arguments(argv)
  profile = case.profile(_PROFILE.value)
  question, name = target(profile), _MODEL.value if profile is None else profile.model
  if profile is None:
    model, device = case.model(name, _BYTES.value, _KV_BYTES.value), case.device(_HARDWARE.value)
  else:
    model, device = case.profiled_device(profile)
  solution = solve.solve(model, device.hardware, question)
  solve.check_feasible(question, solution, others="decoders, context or max_prefix")
  heading = case.heading(name, model, device) if profile is None else case.profile_heading(profile)
  print(heading)
  if warning := case.fits(model, device, question.resident + question.max_prefix):
    print(warning)
  print(f"\n{solve.reason(question, solution)}")
  ridge = f"{solution.ridge_tokens:.0f} tokens, the ridge point"
  below = solution.budget < solution.ridge_tokens
  print(f"The budget is {'below' if below else 'above'} {ridge}: a chunk "
        f"{'does not pay' if below else 'pays'} for its own weight stream.")  # fmt: skip
  print(f"\n{table(solution)}")
  if _OUT.value:
    path = pathlib.Path(_OUT.value).expanduser() / "itl.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"{name} on {device.hardware.name}: {_DECODERS.value} decoding at " \
            f"{_CONTEXT.value:,} tokens of context"  # fmt: skip
    path.write_text(chart.draw(model, device.hardware, question, solution, title), "utf-8")
    print(f"\nWrote {path}")
  print(json.dumps(document(name, question, solution, device)))


def main(argv):
  try:
    run(argv)
  except ValueError as error:
    print(f"experiments.solve: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("solve", FLAGS, flags.Error))
