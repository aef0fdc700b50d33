"""From a configuration to results, charts and a page: what all experiments do alike."""

import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from experiments import case, report
from experiments.store import Store

Rows = list[dict[str, Any]]


def execute(
  main_file: str, argv: Sequence[str], configure: Callable[[], Any],
  run: Callable[[Any, Store], Rows],
  page: Callable[[Any, Sequence[Mapping[str, Any]]], report.Page], *, out: str | None, record: bool,
) -> int:  # fmt: skip
  """Runs what is missing, prints a table and findings, writes charts and report.html.

  Results lie in `out`, by default runs/NAME, or with `record` in the experiment's own results/. The
  last line of stdout is one JSON document. Returns the exit code: 2 for a mistake, which may be in
  what `configure` makes of the flags.
  """
  home = pathlib.Path(main_file).resolve().parent
  folder = home / "results" if record else pathlib.Path(out or f"runs/{home.name}").expanduser()
  logging.set_verbosity(logging.INFO)
  logging.set_stderrthreshold("info")
  try:
    case.no_arguments(argv)
    config = configure()
    store = Store(folder, _sources(home))
    rows = run(config, store)
  except (ValueError, OSError) as error:
    print(f"experiments.{home.name}: {error}", file=sys.stderr)
    return 2
  shown = page(config, rows)
  print(f"{shown.title}\n{shown.setup}\n\n{report.text_table(shown.rows, shown.columns)}\n")
  for finding in shown.findings:
    print(f"* {finding}")
  made = store.origin()
  try:
    paths = report.write(folder, shown, made)
    print(f"\nWrote {paths[-1]} and {len(paths) - 1} drawings")
  except ModuleNotFoundError as error:
    print(f"\nNo plots: {error}; install the extra 'plot'", file=sys.stderr)
  document = {"experiment": home.name, "rows": rows, "findings": list(shown.findings), **made}
  print(json.dumps(document))
  return 0


def _sources(home: pathlib.Path) -> list[pathlib.Path]:
  """What the results of an experiment depend on, of its own files."""
  first = [home / "run.py", home / "config.py"]
  others = {"__init__.py", "__main__.py", "plot.py", "live.py"}
  return first + sorted(
    path for path in home.glob("*.py") if path not in first and path.name not in others
  )  # fmt: skip
