"""The simulator against Vidur, another simulator: `python -m experiments.vidur --trace FILE`.

Needs an interpreter with Vidur, in an environment of its own (`pip install vidur`, Python 3.11):

  python -m experiments.vidur --trace azure.csv --vidur_python /path/to/venv/bin/python

Prints steps, virtual end and steps per second of both, then one JSON line; --record appends it.
"""

import json
import os

from absl import app, flags

from experiments import case, provenance
from experiments.vidur import run
from jaxserve import workload

FLAGS = flags.FLAGS
_TRACE = flags.DEFINE_string("trace", None, "Trace: Azure CSV, Mooncake or LLMServingSim JSONL.")
_PYTHON = flags.DEFINE_string("vidur_python", None, "Interpreter that has the package vidur.")
_REQUESTS = flags.DEFINE_integer("requests", 400, "First so many of the trace.", lower_bound=1)
_BUDGET = flags.DEFINE_integer("budget", 512, "Tokens of a step.", lower_bound=run.SEATS)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each, in turn.", lower_bound=1)
_RECORD = flags.DEFINE_bool("record", False, "Append the result to results/.")


def main(argv):
  del argv
  load = workload.read(_TRACE.value).first(_REQUESTS.value).fitting(run.LONGEST)
  rows = run.compare(_PYTHON.value, load, _BUDGET.value, _REPEATS.value)
  print(f"{'':>10}{'steps':>10}{'ends at s':>12}{'seconds':>10}{'steps/s':>10}")
  for name, row in rows.items():
    print(
      f"{name:>10}{row['steps']:>10,}{row['end_s']:>12.3f}{row['seconds']:>10.2f}"
      f"{row['steps_per_s']:>10,.0f}"
    )
  result = {
    **provenance.collect(), "requests": len(load), "budget": _BUDGET.value,
    "load_average": os.getloadavg()[0], **rows,
  }  # fmt: skip
  print(json.dumps(result))
  if _RECORD.value:
    provenance.append(__file__, result)


if __name__ == "__main__":
  flags.mark_flags_as_required(["trace", "vidur_python"])
  app.run(main, flags_parser=case.flags_parser("vidur", FLAGS, flags.Error))
