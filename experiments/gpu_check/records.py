"""The results: a file of JSON lines, one when a case begins and one when it ends."""

import hashlib
import json
import pathlib
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
_SOURCES = ("jaxserve", "pallas_kernels", "experiments/gpu_check")


def source_digest():
  """Of everything a result depends on, committed or not."""
  digest = hashlib.sha256()
  for folder in _SOURCES:
    for path in sorted((ROOT / folder).rglob("*.py")):
      digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
  return digest.hexdigest()[:12]


class Records:
  """Results of one run, appended as they come; those of earlier runs of the same sources."""

  def __init__(self, path, run, resume):
    self.path, self.run, self.source = pathlib.Path(path), run, source_digest()
    self._resume = resume
    self.path.parent.mkdir(parents=True, exist_ok=True)

  def append(self, stage, case, status, **values):
    """Adds one line, which survives whatever comes next."""
    line = {
      "stage": stage, "case": case, "status": status, **values, "run": self.run,
      "source": self.source, "at": round(time.time(), 1),
    }  # fmt: skip
    with self.path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(line) + "\n")
    return line

  def lines(self):
    """Lines of this run, and with `resume` those of earlier runs of the same sources."""
    if not self.path.exists():
      return []
    found = []
    for text in self.path.read_text("utf-8").splitlines():
      try:
        line = json.loads(text)
      except ValueError:  # cut while it was written
        continue
      mine = line.get("run") == self.run
      if mine or (self._resume and line.get("source") == self.source):
        found.append(line)
    return found

  def finished(self):
    """The last line of every (stage, case) that ended, in order."""
    last = {}
    for line in self.lines():
      if line["status"] != "begin":
        last[line["stage"], line["case"]] = line
    return last

  def is_done(self, stage, case):
    """Whether a case needs no further try: it went well, or it has failed in this very run."""
    line = self.finished().get((stage, case))
    if line is None or line["status"] == "no time":
      return False
    return line["status"] in ("ok", "absent") or line["run"] == self.run

  def begun(self, stage):
    """The case of a stage that began and has not ended, or None."""
    open_case = None
    for line in self.lines():
      if line["stage"] == stage and line["run"] == self.run:
        open_case = line["case"] if line["status"] == "begin" else None
    return open_case

  def values(self, stage):
    """The results of a stage by case: those that went well."""
    return {
      case: line for (s, case), line in self.finished().items()
      if s == stage and line["status"] == "ok"
    }  # fmt: skip
