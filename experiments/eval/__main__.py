"""Perplexity of a model on a text; see README.md."""

import json
import math
from pathlib import Path

from absl import app, flags, logging

from experiments.eval import scoring
from jaxserve.model import source
from jaxserve.text.tokenizer import load_tokenizer

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "As --model of jaxserve.main.")
_TEXT = flags.DEFINE_string(
  "text", None, "File to read, UTF-8. Default: the text kept beside this."
)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["bfloat16", "float32"], "Of weights and products.")
_QUANTIZE = flags.DEFINE_enum("quantize", "none", ["none", "int8", "int4"], "Of the matrices.")
_CONTEXT = flags.DEFINE_integer("context", 1024, "Tokens of a window.", lower_bound=2)
_STRIDE = flags.DEFINE_integer("stride", None, "New tokens of a window. Default: half of it.")
_CACHE_DIR = flags.DEFINE_string("cache_dir", "~/.cache/jaxserve", "Converted models.")


def main(argv: list[str]) -> int:
  del argv
  try:
    text = Path(_TEXT.value or scoring.TEXT).read_text(encoding="utf-8")
    cache_dir = Path(_CACHE_DIR.value).expanduser()
    checkpoint = source.load_checkpoint(_MODEL.value, cache_dir, _DTYPE.value)
    tokenizer = load_tokenizer(
      checkpoint.tokenizer_json, checkpoint.eos_token_ids, checkpoint.bos_token_id
    )
    scorer = scoring.Scorer(checkpoint, _DTYPE.value, _QUANTIZE.value, _CONTEXT.value)
    tokens = tokenizer.encode(text)
    result = scoring.score(scorer, tokens, _STRIDE.value or max(_CONTEXT.value // 2, 1))
  except (OSError, ValueError) as error:
    logging.error("%s", error)
    return 2
  bits = result.nats * result.tokens / math.log(2)
  document = {
    "model": checkpoint.name,
    "dtype": _DTYPE.value,
    "quantize": _QUANTIZE.value,
    "tokens": result.tokens,
    "nats": round(result.nats, 6),
    "perplexity": round(result.perplexity, 4),
    "bits_per_byte": round(bits / len(text.encode()), 5),
  }
  print(json.dumps(document))
  return 0


if __name__ == "__main__":
  app.run(main)
