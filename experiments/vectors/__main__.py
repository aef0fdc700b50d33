"""Compares jaxserve with recorded decisions: `python -m experiments.vectors --file FILE.json`.

A file holds scenarios in one of two formats: decisions of vLLM V1 (`config_cases`, `request_cases`,
`scenarios`, `ops_scenarios`, `kv_scenarios`), or of SGLang, Sarathi-Serve and its baselines
(`scenarios` that name a `policy`). Every scenario gives one line:

  pass NAME                             every expected value was compared and is equal
  differs NAME: first difference
  unsupported NAME: why                 a feature or a field that is not there; or a deliberate
                                        difference, found by a general rule

The last line is a JSON document of the counts. Exits with 1 if a scenario differs.
"""

import json
import pathlib
import sys

from absl import app, flags

from experiments.vectors import suite

FLAGS = flags.FLAGS
_FILE = flags.DEFINE_string("file", None, "JSON file of scenarios.", required=True)
_ONLY = flags.DEFINE_string("only", "", "Run only scenarios whose name contains this.")


def main(_):
  document = json.loads(pathlib.Path(_FILE.value).read_text("utf-8"))
  counts = dict.fromkeys(("pass", "differs", "unsupported"), 0)
  for outcome in suite.run(document, only=_ONLY.value):
    print(outcome.line, flush=True)
    counts[outcome.kind] += 1
  print(json.dumps(counts))
  sys.exit(counts["differs"] > 0)


if __name__ == "__main__":
  app.run(main)
