"""A server under clients that behave badly: `python -m experiments.soak`.

For ten minutes (--seconds), requests of every kind come, leave at every stage, are malformed, too
long, or read slowly. At the end every request that stayed has been answered exactly once, all pages
are free, nothing was compiled, and threads, files and memory have not grown since the first
quarter; exit code 1 otherwise. The last line is one JSON document; --record appends it to results/.
"""

import json
import pathlib
import sys

from absl import app, flags, logging

from jaxserve.engine import devices

devices.set_up()

from experiments import case, provenance  # noqa: E402
from experiments.soak import run  # noqa: E402
from jaxserve import server  # noqa: E402
from jaxserve.engine import startup  # noqa: E402
from jaxserve.text.tokenizer import load_tokenizer  # noqa: E402

FLAGS = flags.FLAGS
_SECONDS = flags.DEFINE_float("seconds", 600.0, "Of load.", lower_bound=1.0)
_CLIENTS = flags.DEFINE_integer("clients", 24, "At once.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of all that clients choose.")
_MODEL = flags.DEFINE_string("model", "random", "As for jaxserve.main.")
_CACHE = flags.DEFINE_string("cache_dir", "~/.cache/jaxserve", "As for jaxserve.main.")
_RECORD = flags.DEFINE_bool("record", False, "Append the result to results/.")


def _served():
  options = startup.StartOptions(
    model=_MODEL.value, cache_dir=pathlib.Path(_CACHE.value).expanduser(), budget=32,
    max_num_seqs=8, max_model_len=256, page_size=16, kv_cache_tokens=1024, score_prompts=True,
  )  # fmt: skip
  started = startup.start(options)
  started.engine.warm_up()
  checkpoint = started.checkpoint
  tokenizer = load_tokenizer(
    checkpoint.tokenizer_json, checkpoint.eos_token_ids, checkpoint.bos_token_id
  )
  return server.Served(
    engine=started.engine, tokenizer=tokenizer, chat_template=checkpoint.chat_template,
    name=_MODEL.value,
  )  # fmt: skip


def main(argv):
  logging.set_verbosity(logging.INFO)
  try:
    case.no_arguments(argv)
    served = _served()
  except ValueError as error:
    print(f"experiments.soak: {error}", file=sys.stderr)
    return 2
  config = run.Config(seconds=_SECONDS.value, clients=_CLIENTS.value, seed=_SEED.value)
  found = run.execute(config, served) | provenance.collect()
  found |= {"load_average": provenance.load_average()}
  for failure in found["failures"]:
    print("FAILED:", failure)
  if _RECORD.value:
    provenance.append(__file__, found)
  print(json.dumps(found))
  return 1 if found["failures"] else 0


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("soak", FLAGS, flags.Error))
