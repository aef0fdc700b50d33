"""Predicts live runs of the engine from calibration alone: `python -m experiments.fidelity`.

Calibrates and serves in turn, so that a slow minute of the machine falls upon both, at three rates
of arrival; then simulates the same arrivals. Writes drawings and report.html to runs/fidelity; with
--record to results/, where the last line, one JSON document, is appended too.
"""

import json
import pathlib
import sys

from absl import app, flags, logging

from jaxserve.engine import devices

devices.set_up()

from experiments import case, provenance, report  # noqa: E402
from experiments.calibrate import config as calibrate_config  # noqa: E402
from experiments.fidelity import config, plot, run  # noqa: E402

FLAGS = flags.FLAGS
_DEFAULT, _ENGINE = config.Config(), calibrate_config.Config()
_MODEL = flags.DEFINE_string("model", _ENGINE.model, "As for jaxserve.main.")
_BUDGET = flags.DEFINE_integer("budget", _ENGINE.budget, "Tokens of a step.", lower_bound=16)
_SEATS = flags.DEFINE_integer("max_num_seqs", _ENGINE.seats, "Most rows.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("max_model_len", _ENGINE.length, "Longest request.")
_CACHE = flags.DEFINE_string("cache_dir", _ENGINE.cache_dir, "As for jaxserve.main.")
_REQUESTS = flags.DEFINE_integer("requests", _DEFAULT.requests, "Of a run.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", _DEFAULT.repeats, "Live runs a load.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", _DEFAULT.prompt, "Median prompt.", lower_bound=1)
_OUTPUT = flags.DEFINE_integer("output", _DEFAULT.output, "Median outputs.", lower_bound=4)
_SHARES = flags.DEFINE_list("share", list(map(str, _DEFAULT.shares)), "Of the burst's rate.")
_OUT = flags.DEFINE_string("out", "runs/fidelity", "Folder of the results; '' for none.")
_RECORD = flags.DEFINE_bool("record", False, "Keep the results in results/.")


def chosen():
  engine = calibrate_config.Config(
    model=_MODEL.value, budget=_BUDGET.value, seats=_SEATS.value, length=_LENGTH.value,
    cache_dir=_CACHE.value, rounds=_REPEATS.value,
  )  # fmt: skip
  shares = case.numbers("share", _SHARES.value, float)
  if shares[0] <= 0:
    raise ValueError(f"share={shares[0]:g}: must be positive")
  return config.Config(
    engine=engine, requests=_REQUESTS.value, repeats=_REPEATS.value, prompt=_PROMPT.value,
    output=_OUTPUT.value, shares=shares,
  )  # fmt: skip


def compare():
  conf = chosen()
  rows, profile, residuals = run.run(conf)
  page, made = plot.page(conf, rows, profile, residuals), provenance.collect()
  print(f"{page.title}\n{page.setup}\n\n{report.text_table(page.rows, page.columns)}\n")
  for finding in page.findings:
    print(f"* {finding}")
  folder = pathlib.Path(__file__).parent / "results" if _RECORD.value else _OUT.value
  if folder:
    try:
      print(f"\nWrote {report.write(pathlib.Path(folder), page, made)[-1]}")
    except ModuleNotFoundError as error:
      print(f"No plots: {error}; install the extra 'plot'", file=sys.stderr)
  result = {"rows": rows, "residuals": residuals, "costs": vars(profile.costs)} | made
  if _RECORD.value:
    provenance.append(__file__, result)
  print(json.dumps(result))


def main(argv):
  logging.set_verbosity(logging.INFO)
  try:
    case.no_arguments(argv)
    compare()
  except (ValueError, NotImplementedError, OSError) as error:
    print(f"experiments.fidelity: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("fidelity", FLAGS, flags.Error))
