"""What drafts bring and cost on this machine: `python -m experiments.speculation`.

An engine with drafts against one without, in turn and in one process, on texts that repeat
themselves, ordinary answers, and random tokens. The last line is one JSON document; --record
appends it to results/.
"""

import json
import sys

from absl import app, flags, logging

from jaxserve.engine import devices

devices.set_up()

from experiments import case, provenance, report  # noqa: E402
from experiments.speculation import config, run  # noqa: E402
from jaxserve.engine import speculation  # noqa: E402

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_MODEL = flags.DEFINE_string("model", _DEFAULT.model, "As for jaxserve.main.")
_DTYPE = flags.DEFINE_enum(
  "dtype", _DEFAULT.dtype, ["bfloat16", "float32"], "As for jaxserve.main."
)
_SPECULATE = flags.DEFINE_string("speculate", "ngram:k=4", "As for jaxserve.main.")
_OUTPUTS = flags.DEFINE_integer("outputs", _DEFAULT.outputs, "Of a request.", lower_bound=8)
_ROUNDS = flags.DEFINE_integer("rounds", _DEFAULT.rounds, "All cases each.", lower_bound=1)
_CACHE = flags.DEFINE_string("cache_dir", _DEFAULT.cache_dir, "As for jaxserve.main.")
_STEPS = flags.DEFINE_bool("steps", False, "Only what a step without drafts costs, step by step.")
_RECORD = flags.DEFINE_bool("record", False, "Append the result to results/.")

COLUMNS = (
  ("text", "name", "{}"),
  ("rows", "rows", "{}"),
  ("plain ms", "plain_ms", "{:.1f}"),
  ("drafting ms", "drafting_ms", "{:.1f}"),
  ("plain tokens/s", "plain_tokens_per_s", "{:.1f}"),
  ("tokens/s", "tokens_per_s", "{:.1f}"),
  ("ratio", "speedup", "{:.2f}"),
  ("of processor time", "cpu_speedup", "{:.2f}"),
  ("tokens a step", "decode_tokens_per_step", "{:.2f}"),
  ("accepted", "acceptance_rate", "{:.0%}"),
  ("same tokens", "same_tokens", "{:.1%}"),
)


def main(argv):
  logging.set_verbosity(logging.INFO)
  try:
    case.no_arguments(argv)
    chosen = config.Config(
      model=_MODEL.value, dtype=_DTYPE.value, speculate=speculation.parse(_SPECULATE.value),
      outputs=_OUTPUTS.value, rounds=_ROUNDS.value, cache_dir=_CACHE.value,
    )  # fmt: skip
    rows = run.steps(chosen) if _STEPS.value else run.run(chosen)
  except (ValueError, NotImplementedError, OSError) as error:
    print(f"experiments.speculation: {error}", file=sys.stderr)
    return 2
  print(report.text_table(rows, COLUMNS))
  result = {"rows": rows, "speculate": _SPECULATE.value, "dtype": _DTYPE.value}
  result |= {"model": _MODEL.value, "outputs": _OUTPUTS.value} | provenance.collect()
  if _RECORD.value:
    provenance.append(__file__, result)
  print(json.dumps(result))
  return 0


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("speculation", FLAGS, flags.Error))
