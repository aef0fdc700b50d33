"""Measures the engine and fits the cost model: `python -m experiments.calibrate`.

Runs steps of decodes, of chunks and of both through the engine of this machine, fits seven costs,
prints how well they explain the steps, and writes a profile that `--profile` of jaxserve.main,
experiments.simulate and experiments.solve reads. The last line is one JSON document; --record
appends it to results/.
"""

import dataclasses
import json
import pathlib
import sys

from absl import app, flags, logging

from jaxserve.engine import devices

devices.set_up()

from experiments import case, provenance, report  # noqa: E402
from experiments.calibrate import config, measure, run  # noqa: E402
from jaxserve.engine import profiles  # noqa: E402

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_MODEL = flags.DEFINE_string("model", _DEFAULT.model, "As for jaxserve.main.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "As for jaxserve.main.")
_BUDGET = flags.DEFINE_integer("budget", _DEFAULT.budget, "Largest step.", lower_bound=16)
_SEATS = flags.DEFINE_integer("max_num_seqs", _DEFAULT.seats, "Most rows.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("max_model_len", _DEFAULT.length, "Longest request.")
_PAGE = flags.DEFINE_integer("page_size", _DEFAULT.page_size, "Of a KV page.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", _DEFAULT.rounds, "Of all plans.", lower_bound=1)
_CACHE = flags.DEFINE_string("cache_dir", _DEFAULT.cache_dir, "As for jaxserve.main.")
_OUTPUT = flags.DEFINE_string(
  "output", None, "Profile file. Default: CACHE_DIR/profiles/MODEL-DTYPE.json."
)
_OUT = flags.DEFINE_string("out", "runs/calibrate", "Folder of the plot; '' for none.")
_RECORD = flags.DEFINE_bool("record", False, "Keep plot and last line in results/.")


def chosen():
  return config.Config(
    model=_MODEL.value, dtype=_DTYPE.value, budget=_BUDGET.value, seats=_SEATS.value,
    length=_LENGTH.value, page_size=_PAGE.value, rounds=_ROUNDS.value, cache_dir=_CACHE.value,
  )  # fmt: skip


def path_of(profile):
  if _OUTPUT.value:
    return pathlib.Path(_OUTPUT.value).expanduser()
  folder = pathlib.Path(_CACHE.value).expanduser() / "profiles"
  return folder / f"{profile.model.replace('/', '_')}-{profile.dtype}.json"


def calibrate():
  conf = chosen()
  started = config.start(conf)
  engine = started.engine
  loads = [provenance.load_average()]
  seen = measure.observe(engine, run.plans_of(conf, engine), conf.rounds)
  loads.append(provenance.load_average())
  engine.close()
  profile, found = run.calibrate(engine, started.checkpoint.name, seen)
  rows = run.residuals(seen, found)
  made = provenance.collect() | {"load_average": loads}
  path = path_of(profile)
  profiles.save(path, profile, buckets=engine.config.buckets, residuals=rows, made=made)
  print("\n".join(run.words(profile.costs)))
  print(report.text_table(rows, run.COLUMNS))
  print(f"Wrote {path}; use it with --profile={path}")
  draw(run.page(conf, profile, seen, found, rows), made)
  result = {"profile": str(path), "costs": dataclasses.asdict(profile.costs), "residuals": rows}
  result |= {"model": profile.model, "dtype": profile.dtype} | made
  if _RECORD.value:
    provenance.append(__file__, result | {"profile": path.name})
  print(json.dumps(result))


def draw(page, made):
  folder = _OUT.value
  if _RECORD.value:
    folder = pathlib.Path(__file__).parent / "results"
  if folder:
    try:
      report.write(pathlib.Path(folder), page, made)
    except ModuleNotFoundError as error:
      print(f"No plots: {error}; install the extra 'plot'", file=sys.stderr)


def main(argv):
  logging.set_verbosity(logging.INFO)
  try:
    case.no_arguments(argv)
    calibrate()
  except (ValueError, NotImplementedError, OSError) as error:
    print(f"experiments.calibrate: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("calibrate", FLAGS, flags.Error))
