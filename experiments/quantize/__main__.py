"""Accuracy and speed of quantized weights; see README.md."""

import dataclasses
import json
from pathlib import Path

from absl import app, flags

from experiments.eval import scoring
from experiments.quantize import run
from jaxserve.model import source
from jaxserve.text.tokenizer import load_tokenizer

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "As --model of jaxserve.main.")
_CONTEXT = flags.DEFINE_integer("context", 1024, "Tokens compared, and of a window.")
_ROWS = flags.DEFINE_integer("rows", 8, "Requests that decode.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 256, "Context of a decode.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 31, "Timed steps of each variant.", lower_bound=1)
_CACHE_DIR = flags.DEFINE_string("cache_dir", "~/.cache/jaxserve", "Converted models.")
_OUT = flags.DEFINE_string("out", None, "File to write the table to, as JSON.")


def main(argv: list[str]) -> None:
  del argv
  cache_dir = Path(_CACHE_DIR.value).expanduser()
  checkpoint = source.load_checkpoint(_MODEL.value, cache_dir, "float32")
  tokenizer = load_tokenizer(checkpoint.tokenizer_json, checkpoint.eos_token_ids)
  tokens = tokenizer.encode(scoring.TEXT.read_text(encoding="utf-8"))
  rows = run.accuracy(checkpoint, tokens, _CONTEXT.value)
  times = run.decode_times(
    checkpoint, tuple(run.VARIANTS), _ROWS.value, _LENGTH.value, _REPEATS.value
  )
  rows = run.with_times(rows, times)
  for row in rows:
    print(json.dumps(dataclasses.asdict(row)))
  if _OUT.value:
    setting = {"model": checkpoint.name, "rows": _ROWS.value, "length": _LENGTH.value}
    table = {**setting, "variants": [dataclasses.asdict(row) for row in rows]}
    Path(_OUT.value).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
  app.run(main)
