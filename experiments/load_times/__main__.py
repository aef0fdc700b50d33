"""Loads one model from each format, cold pages aside; see README.md."""

import json
import shutil
import tempfile
import time
from pathlib import Path

from absl import app, flags, logging

from experiments.load_times import measure
from jaxserve.model import source

_MODEL = flags.DEFINE_string(
  "model", None, "A GGUF file or a Hugging Face directory. Default: random weights of 1.24e9."
)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "To load as.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Loads of each format.", lower_bound=1)


def _report(name: str, loads: list[measure.Load]) -> dict[str, float | str]:
  best = min(loads, key=lambda load: load.seconds)
  peak = max(load.peak_share for load in loads)
  row = {
    "format": name, "stored_mb": round(best.file_bytes / 1e6), "seconds": round(best.seconds, 2),
    "gb_s": round(best.gb_s, 2), "peak_share": round(peak, 2),
  }  # fmt: skip
  print(json.dumps(row))
  return row


def main(argv: list[str]) -> None:
  del argv
  scratch = Path(tempfile.mkdtemp(prefix="load-"))
  try:
    path = scratch / "model"
    if _MODEL.value is None:
      measure.write_checkpoint(path, measure.LLAMA_1B)
    else:
      path = Path(_MODEL.value)
    kind = "gguf" if path.is_file() else "safetensors"
    _report(kind, [measure.load(str(path), _DTYPE.value) for _ in range(_REPEATS.value)])
    begin = time.perf_counter()
    source.convert(str(path), scratch / "native", scratch)
    seconds = time.perf_counter() - begin
    logging.info("converted in %.1f s", seconds)
    print(json.dumps({"format": f"{kind} to orbax", "seconds": round(seconds, 2)}))
    native = str(scratch / "native")
    _report("orbax", [measure.load(native, _DTYPE.value) for _ in range(_REPEATS.value)])
  finally:
    shutil.rmtree(scratch)


if __name__ == "__main__":
  app.run(main)
