"""Looks at recorded runs, the `steps.jsonl` that `python -m jaxserve.main` writes.

  python -m experiments.plans show FILE [--svg OUT]   draws it in the terminal, and as a file
  python -m experiments.plans diff A B                compares two runs step by step
  python -m experiments.plans replay FILE             executes it again and compares every bit

FILE may end in #N for the Nth run of the file alone: `diff steps.jsonl#1 steps.jsonl#2`. Exit code
0: fine or equal, 1: different, 2: a mistake or a file that cannot be used. The format is described
in `jaxserve/replay/recording.py`.
"""

import dataclasses
import pathlib
import re
import shutil
import sys

from absl import app, flags, logging

from jaxserve.engine import devices

devices.set_up()

from jaxserve.replay import differences, recording, replaying, timeline  # noqa: E402
from jaxserve.replay.codec import RecordingError  # noqa: E402

_SVG = flags.DEFINE_string("svg", None, "show: write an SVG here; of several runs one each.")
_WIDTH = flags.DEFINE_integer(
  "width", None, "show: characters of a line. Default: the terminal's.", lower_bound=40
)
_CACHE = flags.DEFINE_string("cache_dir", "~/.cache/jaxserve", "replay: as for jaxserve.main.")

_COMMANDS = {"show": 1, "diff": 2, "replay": 1}  # and their files


def load(argument):
  """The recording that FILE or FILE#N names."""
  name, number = argument, None
  match = re.fullmatch(r"(.+)#(\d+)", argument)
  if match and not pathlib.Path(argument).exists():
    name, number = match[1], int(match[2])
  try:
    record = recording.read(pathlib.Path(name).expanduser())
  except RecordingError as error:
    raise RecordingError(f"{name}: {error}") from error
  for note in record.notes:
    print(f"{name}: note: {note}", file=sys.stderr)
  if number is not None:
    if not 1 <= number <= len(record.runs):
      raise RecordingError(f"{argument}: the file has runs 1 to {len(record.runs)}")
    record = dataclasses.replace(record, runs=record.runs[number - 1 : number])
  if not record.runs:
    raise RecordingError(f"{name}: it has no run; record one")
  return record


def show(argument):
  """Prints header and runs; writes the drawings if asked to."""
  record = load(argument)
  header = record.header
  versions = " ".join(f"{name} {version}" for name, version in header.versions.items())
  print(f"{header.model}, {header.config.dtype}, seed {header.seed}, on {header.device.kind}")
  print(f"{versions}, salt {header.salt}")
  print(f"buckets {', '.join(map(str, header.config.buckets))}")
  for number, run in enumerate(record.runs, 1):
    params = ", ".join(f"{name}={value}" for name, value in run.params.items())
    facts = differences.summary(run, run)
    print(f"\nrun {number}: {run.name}, policy {run.policy}, {params}")
    print(", ".join(f"{value} {what}" for what, value, _ in facts))
    print(timeline.text(run, _WIDTH.value or shutil.get_terminal_size((100, 24)).columns))
    if _SVG.value:
      out = pathlib.Path(_SVG.value).expanduser()
      if len(record.runs) > 1:
        out = out.with_name(f"{out.stem}-{number}{out.suffix}")
      out.parent.mkdir(parents=True, exist_ok=True)
      out.write_text(timeline.drawing(run), "utf-8")
      print(f"Wrote {out}")
  return 0


def diff(left_argument, right_argument):
  """Prints where the runs of two recordings part; 1 if they do."""
  left, right = load(left_argument), load(right_argument)
  for line in differences.header_differences(left.header, right.header):
    print(f"setting {line}")
  differ = len(left.runs) != len(right.runs)
  if differ:
    print(f"{len(left.runs)} runs | {len(right.runs)} runs; comparing those that both have")
  for a, b in zip(left.runs, right.runs, strict=False):
    differ |= _diff_runs(a, b)
  print("different" if differ else "equal")
  return int(differ)


def _diff_runs(a, b):
  print(f"\n{a.name} | {b.name}")
  first = differences.first_difference(a, b)
  print(f"  first difference: {first or 'none'}")
  if first:
    print(f"  first step that differs: {differences.first_step_difference(a, b) or 'none'}")
  for what, x, y in differences.summary(a, b):
    print(f"  {what:14} {x:>12} {y:>12}")
  print(f"  {differences.agreement(a, b)}")
  return first is not None


def replay(argument):
  """Builds the engine of a recording and repeats it; 1 at the first difference."""
  record = load(argument)
  for caution in replaying.cautions(record.header):
    print(f"warning: {caution}", file=sys.stderr)
  engine = replaying.build_engine(record.header, pathlib.Path(_CACHE.value).expanduser())
  for number, run in enumerate(record.runs, 1):
    difference = replaying.replay_run(record, run, engine)
    if difference:
      print(f"run {number} ({run.name}) differs (recorded | replayed) at {difference}")
      return 1
    print(f"run {number} ({run.name}): {len(run.steps)} steps, {len(run.tokens)} requests: "
          "every plan, token and logits digest is the same, bit by bit")  # fmt: skip
  return 0


def main(argv):
  """Runs one command."""
  command, files = (argv[1] if len(argv) > 1 else ""), argv[2:]
  if len(files) != _COMMANDS.get(command, -1):
    print(f"unexpected arguments {argv[1:]}\n\n{__doc__}", file=sys.stderr)
    return 2
  logging.set_verbosity(logging.INFO)
  try:
    return {"show": show, "diff": diff, "replay": replay}[command](*files)
  except ValueError as error:
    print(f"plans: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
  app.run(main)
