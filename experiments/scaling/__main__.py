"""What a step costs as everything grows: `python -m experiments.scaling`.

Steps of the model against rows, context and tokens, and against max_model_len and the size of the
KV pool, which must not matter; calls of the scheduler against pool, lengths, slots and seats, with
and without the prefix cache; and the host's time of a step outside device work. Prints verdicts,
draws a chart for every axis to runs/scaling, or with --record to results/; the last line is JSON.
"""

import json
import pathlib
import sys

from absl import app, flags

from jaxserve.engine import devices

devices.set_up()

from experiments import case, provenance, report  # noqa: E402
from experiments.scaling import config, plot, run  # noqa: E402

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_MODEL = flags.DEFINE_string("model", _DEFAULT.model, "As for jaxserve.main; random is tiny.")
_ONLY = flags.DEFINE_list("only", list(config.PARTS), f"Some of {', '.join(config.PARTS)}.")
_ROUNDS = flags.DEFINE_integer("rounds", _DEFAULT.rounds, "Repetitions in turn.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", _DEFAULT.steps, "Timed in a round.", lower_bound=1)
_BASE = flags.DEFINE_string("base", None, "A checkout to measure host time of in turn.")
_CACHE = flags.DEFINE_string("cache_dir", str(_DEFAULT.cache_dir), "As for jaxserve.main.")
_OUT = flags.DEFINE_string("out", "runs/scaling", "Where the page and its plots go.")
_RECORD = flags.DEFINE_bool("record", False, "Write to results/ of the experiment instead.")


def main(argv):
  try:
    case.no_arguments(argv)
    chosen = config.Config(
      model=_MODEL.value, only=tuple(_ONLY.value), rounds=_ROUNDS.value, steps=_STEPS.value,
      base=_BASE.value, cache_dir=pathlib.Path(_CACHE.value).expanduser(),
    )  # fmt: skip
    before = provenance.load_average()
    points, verdicts = run.run(chosen)
  except (ValueError, OSError) as error:
    print(f"experiments.scaling: {error}", file=sys.stderr)
    return 2
  made = provenance.collect() | {"load_average": f"{before} to {provenance.load_average()}"}
  setup = (
    f"{chosen.model} in {chosen.dtype}, least of the medians of {chosen.rounds} rounds of "
    f"{chosen.steps} steps, all points in turn; load average {made['load_average']}"
  )
  page = plot.page(points, verdicts, setup)
  print(f"{page.title}\n{setup}\n")
  if verdicts:
    print(report.text_table(page.rows, page.columns))
  for finding in page.findings:
    print(f"* {finding}")
  here = pathlib.Path(__file__).parent / "results"
  folder = here if _RECORD.value else pathlib.Path(_OUT.value)
  report.write(folder, page, made)
  result = {"model": chosen.model, "points": points, "verdicts": verdicts} | made
  if _RECORD.value:
    provenance.append(__file__, result)
  print(f"Wrote {folder / 'report.html'}")
  print(json.dumps(result))
  return 0


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("scaling", FLAGS, flags.Error))
