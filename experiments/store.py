"""Results as JSON lines that a sweep can take up again where it stopped.

A line holds a setting, what was measured under it, where that came from, and a digest of all that
it depends on: the setting, what is fixed beside it, the workload, and the sources of the simulator
and of the experiment. A setting whose digest is in the file is not run again.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import provenance
from jaxserve.progress import progress
from jaxserve.workload import Workload

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SOURCES = (
  "jaxserve/sched", "jaxserve/cache", "jaxserve/types", "jaxserve/sim", "jaxserve/workload",
  "jaxserve/metrics", "jaxserve/cost.py", "jaxserve/cost_tables.py", "jaxserve/config.py",
  "jaxserve/cost_profile.py", "jaxserve/pytree.py", "experiments/served.py",
)  # fmt: skip
_MADE_BY = ("digest", "commit", "jax", "device", "cores", "date")

Setting = Mapping[str, Any]


class Store:
  """The results of one experiment in `folder`/results.jsonl.

  Args:
    folder: where the file is, or will be.
    sources: files of the experiment that its results depend on.
  """

  def __init__(self, folder: pathlib.Path, sources: Sequence[pathlib.Path] = ()):
    self._path = folder / "results.jsonl"
    self._code = _code_digest(sources)
    self._rows: dict[str, dict[str, Any]] = {}
    self._used: list[str] = []
    if self._path.exists():
      for line in filter(str.strip, self._path.read_text("utf-8").splitlines()):
        row = json.loads(line)
        self._rows[row["digest"]] = row

  def measure(
    self, desc: str, fixed: Setting, settings: Sequence[Setting],
    run: Callable[[Setting], Mapping[str, Any]],
  ) -> list[dict[str, Any]]:  # fmt: skip
    """One row a setting, in their order; runs only what is missing, and keeps each at once."""
    return self.measure_many(desc, fixed, settings, lambda some: [run(one) for one in some], 1)

  def measure_many(
    self, desc: str, fixed: Setting, settings: Sequence[Setting],
    run: Callable[[Sequence[Setting]], Sequence[Mapping[str, Any]]], at_once: int = 1 << 20,
  ) -> list[dict[str, Any]]:  # fmt: skip
    """As `measure`, but `run` is given up to `at_once` settings, such as lanes of one program."""
    names = [self._digest(fixed, setting) for setting in settings]
    missing = [i for i, name in enumerate(names) if name not in self._rows]
    with progress(len(settings), "settings", desc) as bar:
      bar.advance(len(settings) - len(missing))
      for start in range(0, len(missing), at_once):
        some = missing[start : start + at_once]
        for i, measured in zip(some, run([settings[i] for i in some]), strict=True):
          self._add(names[i], {**settings[i], **measured})
        bar.advance(len(some))
    self._used += names
    return [_without_origin(self._rows[name]) for name in names]

  def origin(self) -> dict[str, str]:
    """Where the rows that were given out come from: commits, versions, machines, dates."""
    rows = [self._rows[name] for name in self._used]
    return {
      key: ", ".join(sorted({str(row[key]) for row in rows})) for key in _MADE_BY if key != "digest"
    }

  def _digest(self, fixed: Setting, setting: Setting) -> str:
    return digest([self._code, dict(fixed), dict(setting)])

  def _add(self, name: str, row: dict[str, Any]) -> None:
    row = row | {"digest": name} | provenance.collect()
    self._rows[name] = row
    self._path.parent.mkdir(parents=True, exist_ok=True)
    with self._path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(row) + "\n")


def digest(value: Any) -> str:
  """16 hex digits of what a value is made of."""
  text = json.dumps(value, sort_keys=True, default=str)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def workload_digest(load: Workload) -> str:
  """Of every array of a workload."""
  whole = hashlib.sha256()
  for array in (load.arrival_s, load.num_prompt, load.num_output, load.priority):
    whole.update(array.tobytes())
  return whole.hexdigest()[:16]


def _without_origin(row: Mapping[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in row.items() if key not in _MADE_BY}


def _code_digest(sources: Sequence[pathlib.Path]) -> str:
  files = list(sources)
  for name in _SOURCES:
    path = _ROOT / name
    files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
  whole = hashlib.sha256()
  for file in files:
    whole.update(file.read_bytes())
  return whole.hexdigest()[:16]
