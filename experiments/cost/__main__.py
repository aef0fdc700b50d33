"""What chunked prefill costs, from formulas: `python -m experiments.cost --model llama3-8b`.

A long prompt arrives among decoding requests. Prints every quantity with its value and formula,
then one JSON line. The defaults are the reference case: Llama-3-8B on an H100, 32 decodes at 2,048
tokens of context, a prompt of 32,768 tokens. --hardware=this measures the device in use first.
Symbols: P parameters, b bytes a parameter, L layers, h query heads, h_kv KV heads, d head dim, k KV
bytes a token, S prompt tokens, c chunk tokens, pi FLOP/s and beta bytes/s achieved.
"""

import json
import sys

from absl import app, flags

from experiments import case
from experiments.cost import facts
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
_PROMPT = flags.DEFINE_integer("prompt", 32768, "Tokens of the long prompt.")
_DECODERS = flags.DEFINE_integer("decoders", 32, "Requests that decode meanwhile.")
_CONTEXT = flags.DEFINE_integer("context", 2048, "Tokens cached by each of them.")
_BUDGET = flags.DEFINE_integer("budget", 2048, "Tokens a step.")
_ITL_MS = flags.DEFINE_float("itl_ms", 60.0, "Target of the inter-token gap, for the budgets.")
_MAX_PREFIX = flags.DEFINE_integer(
  "max_prefix", None, "Longest prefix of a chunk, for the budgets. Default: the prompt."
)
_PAGE = flags.DEFINE_integer("page", 64, "Tokens of a KV page.")
_LIMIT_MS = flags.DEFINE_float(
  "limit_ms", 50.0, "A gap that the spike is compared with.", lower_bound=1e-3
)
_SLOT_CHUNK = flags.DEFINE_integer(
  "slot_chunk", 2048, "Chunk that prices a prefill token.", lower_bound=1
)
_SLOT_CONTEXT = flags.DEFINE_integer(
  "slot_context", 32768, "Context that prices a decode token.", lower_bound=1
)
_REREAD = flags.DEFINE_integer(
  "reread_prompt", 131072, "Prompt at which re-read KV and weights are compared.", lower_bound=1
)


def setting(device):
  prompt = case.at_least("prompt", _PROMPT.value, 1)
  prefix = prompt if _MAX_PREFIX.value is None else _MAX_PREFIX.value
  target = solve.Case(
    itl=case.milliseconds("itl_ms", _ITL_MS.value),
    decoders=_DECODERS.value,
    context=_CONTEXT.value,
    max_prefix=prefix,
    page_size=case.at_least("page", _PAGE.value, 1),
  )
  return facts.Setting(
    model=case.model(_MODEL.value, _BYTES.value, _KV_BYTES.value),
    hardware=device.hardware,
    prompt=prompt,
    budget=_BUDGET.value,
    target=target,
    limit=_LIMIT_MS.value / 1e3,
    slot_chunk=_SLOT_CHUNK.value,
    slot_context=_SLOT_CONTEXT.value,
    reread_prompt=_REREAD.value,
  )


def main(argv):
  try:
    case.no_arguments(argv)
    device = case.device(_HARDWARE.value)
    chosen = setting(device)
  except ValueError as error:
    print(f"experiments.cost: {error}", file=sys.stderr)
    return 2
  print(case.heading(_MODEL.value, chosen.model, device))
  if warning := case.fits(chosen.model, device, chosen.target.resident + chosen.prompt):
    print(warning)
  table, document = facts.facts(chosen), {"model": _MODEL.value, "hardware": device.hardware.name}
  print()
  for fact in table:
    print(f"{fact.name:36} {fact.shown:48} {fact.formula}")
    document |= fact.values
  print(json.dumps(document))
  return 0


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("cost", FLAGS, flags.Error))
