"""From a configuration to what is measured, summed up, and where it came from."""

import dataclasses
import pathlib
from typing import Any

from absl import logging

from experiments.peers import install, measure, models, table
from experiments.peers.config import PEERS
from experiments.peers.kept import Kept
from experiments.peers.worker import WorkerError

__all__ = ["Result", "WorkerError", "origin", "prepare", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What a run found.

  Attributes:
    folder: of results.jsonl.
    rows: one for each model, case and round.
    summary: one for each model, case and metric.
    findings: sentences.
  """

  folder: pathlib.Path
  rows: list[dict[str, Any]]
  summary: list[dict[str, Any]]
  findings: list[str]


def run(config, folder, cache_dir, retry=False):
  """Measures what `folder` does not hold yet, and sums all of it up; `retry`: see `Kept`."""
  kept = Kept(folder, config.settings, retry)
  logs = pathlib.Path(config.peers_dir).expanduser() / "logs"
  rows, skipped = measure.run(config, kept, cache_dir, logs)
  summary = table.summarize(rows)
  findings = table.findings(summary, rows, skipped)
  return Result(folder=folder, rows=rows, summary=summary, findings=findings)


def prepare(config, cache_dir):
  """Installs and converts; {peer: why it is left out}."""
  folders, skipped = measure.prepared(config)
  for model in config.models:
    hf = models.prepare(model, config.peers_dir, cache_dir)
    for name, folder in folders.items():
      try:
        models.convert(PEERS[name].format, hf, folder)
      except install.Unavailable as error:
        skipped[f"{name} on {model}"] = str(error)
        logging.warning("Left out on %s: %s, %s", model, PEERS[name].title, error)
  return skipped


def origin(rows):
  """Commits, versions, machines, dates and load averages of the rows."""
  of = lambda key: ", ".join(sorted({str(row[key]) for row in rows}))
  versions = {}
  for row in rows:
    for found in row["versions"].values():
      versions |= found
  loads = [row["load_average"] for row in rows]
  return {
    **{key: of(key) for key in ("commit", "device", "cores", "date")},
    "versions": versions, "load_average": [min(loads), max(loads)],
  }  # fmt: skip
