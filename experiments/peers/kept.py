"""Measured rounds as JSON lines; a round that is there is not measured again.

A row holds one case in one round on some engines, and who was left out of it and why. It serves
whoever asks for these engines or some of them, while the sources that it depends on are the same.
"""

import hashlib
import json
import pathlib

from experiments import provenance
from experiments.store import digest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SOURCES = (
  "jaxserve", "pallas_kernels", "experiments/peers/adapters", "experiments/peers/config.py",
  "experiments/peers/figures.py", "experiments/peers/measure.py",
)  # fmt: skip


class Kept:
  """The rows of `folder`/results.jsonl.

  Args:
    folder: where the file is, or will be.
    depends_on: what else the rows depend on; plain data.
    retry: rows in which an engine failed or was left out are no use to who asks for it.
  """

  def __init__(self, folder, depends_on, retry=False):
    self._retry = retry
    self._path, self._code = pathlib.Path(folder) / "results.jsonl", digest([code(), depends_on])
    self._rows = {}
    if self._path.exists():
      for line in filter(str.strip, self._path.read_text("utf-8").splitlines()):
        row = json.loads(line)
        self._rows[row["digest"]] = row

  def find(self, model, case, number, engines):
    """The row, or None unless it says something of all of the engines."""
    row = self._rows.get(self._name(model, case, number))
    if row is None:
      return None
    failed = {name for name, found in row["values"].items() if "error" in found}
    failed |= row["left_out"].keys()
    known = row["values"].keys() - failed if self._retry else row["values"].keys() | failed
    return row if known >= set(engines) else None

  def add(self, model, case, number, values, versions, left_out):
    """Keeps what was measured, at once."""
    row = {
      "model": model, "case": case, "round": number, "values": values, "versions": versions,
      "left_out": left_out,
      "load_average": provenance.load_average(), "digest": self._name(model, case, number),
      **provenance.collect(),
    }  # fmt: skip
    self._rows[row["digest"]] = row
    self._path.parent.mkdir(parents=True, exist_ok=True)
    with self._path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(row) + "\n")
    return row

  def _name(self, model, case, number):
    return digest([self._code, model, case, number])


def code():
  """A digest of the sources that results depend on."""
  whole = hashlib.sha256()
  for name in _SOURCES:
    path = _ROOT / name
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in (f for f in files if f.suffix in (".py", ".mjs")):
      whole.update(file.read_bytes())
  return whole.hexdigest()
