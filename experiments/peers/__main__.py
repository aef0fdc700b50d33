"""jaxserve beside other engines on this CPU: `python -m experiments.peers`.

Installs every peer into an environment of its own under --peers_dir, writes the same weights for
each, and times all of them in interleaved rounds. What is installed, converted or measured already
is used again. Results lie in --out, or with --record in the experiment's own results/. The last
line is one JSON document.
"""

import json
import pathlib
import sys

from absl import app, flags, logging

from experiments import case, provenance, report
from experiments.peers import config, plot, run

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_ONLY = flags.DEFINE_list("only", list(_DEFAULT.peers), "Peers to compare with.")
_MODELS = flags.DEFINE_list("models", list(_DEFAULT.models), "Models.")
_CASES = flags.DEFINE_list("cases", list(_DEFAULT.cases), "What is timed.")
_ROUNDS = flags.DEFINE_integer("rounds", _DEFAULT.rounds, "All cases each.", lower_bound=1)
_PEERS = flags.DEFINE_string("peers_dir", _DEFAULT.peers_dir, "Environments, weights, caches.")
_VENVS = flags.DEFINE_list("venvs", [], "Environments that exist, as hf=DIR.")
_TIMEOUT = flags.DEFINE_float("timeout_s", _DEFAULT.timeout_s, "Of one answer.", lower_bound=1)
_PREPARE = flags.DEFINE_bool("prepare", False, "Only install peers and write weights.")
_RETRY = flags.DEFINE_bool("retry", False, "Try again what failed in an earlier run.")
_CACHE = flags.DEFINE_string("cache_dir", "~/.cache/jaxserve", "As for jaxserve.main.")
_OUT = flags.DEFINE_string("out", "runs/peers", "Folder of the results.")
_RECORD = flags.DEFINE_bool("record", False, "Write to the experiment's results/ instead.")


def main(argv):
  logging.set_verbosity(logging.INFO)
  logging.set_stderrthreshold("info")
  try:
    case.no_arguments(argv)
    chosen = config.Config(
      peers=tuple(_ONLY.value), models=tuple(_MODELS.value), cases=tuple(_CASES.value),
      rounds=_ROUNDS.value, peers_dir=_PEERS.value, timeout_s=_TIMEOUT.value,
      venvs=tuple(config.pair(words) for words in _VENVS.value),
    )  # fmt: skip
    if _PREPARE.value:
      print(json.dumps({"left_out": run.prepare(chosen, _CACHE.value)}))
      return 0
    folder = pathlib.Path(__file__).with_name("results") if _RECORD.value else _OUT.value
    result = run.run(chosen, pathlib.Path(folder).expanduser(), _CACHE.value, _RETRY.value)
  except (ValueError, OSError, run.WorkerError) as error:
    print(f"experiments.peers: {error}", file=sys.stderr)
    return 2
  shown = plot.page(chosen, result.summary, result.findings)
  print(f"{shown.title}\n{shown.setup}\n\n{report.text_table(shown.rows, shown.columns)}\n")
  for finding in shown.findings:
    print(f"* {finding}")
  made = run.origin(result.rows)
  try:
    report.write(result.folder, shown, made)
  except ModuleNotFoundError as error:
    print(f"\nNo plots: {error}; install the extra 'plot'", file=sys.stderr)
  document = {"experiment": "peers", "rows": result.summary, "findings": list(result.findings)}
  print(json.dumps(document | made | {"date": provenance.collect()["date"]}))
  return 0


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("peers", FLAGS, flags.Error))
