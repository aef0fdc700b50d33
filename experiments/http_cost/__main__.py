"""What HTTP costs a step: `python -m experiments.http_cost`.

The engine alone, the same load through the server, and that beside idle connections, in turns; then
one long prompt among a few streams, chunked and not, both ways. Clients run in a process of their
own. Prints medians over rounds, and one JSON line; --record appends it to results/.
"""

import json
import pathlib
import sys

from absl import app, flags, logging

from jaxserve.engine import devices

devices.set_up()

from experiments import case, provenance  # noqa: E402
from experiments.http_cost import run  # noqa: E402
from jaxserve import server  # noqa: E402
from jaxserve.engine import startup  # noqa: E402
from jaxserve.text.tokenizer import load_tokenizer  # noqa: E402

FLAGS = flags.FLAGS
_DEFAULT = run.Config()
_ROUNDS = flags.DEFINE_integer("rounds", _DEFAULT.rounds, "Of everything.", lower_bound=1)
_STREAMS = flags.DEFINE_integer("streams", _DEFAULT.streams, "At once.", lower_bound=2)
_TOKENS = flags.DEFINE_integer("tokens", _DEFAULT.tokens, "Outputs of each.", lower_bound=30)
_IDLE = flags.DEFINE_integer("idle", _DEFAULT.idle, "Idle connections.", lower_bound=0)
_LONG = flags.DEFINE_integer("long", _DEFAULT.long, "Tokens of the long prompt.", lower_bound=2)
_BUDGET = flags.DEFINE_integer("budget", _DEFAULT.budget, "Of chunked runs.", lower_bound=1)
_MODEL = flags.DEFINE_string("model", "random", "As for jaxserve.main.")
_CACHE = flags.DEFINE_string("cache_dir", "~/.cache/jaxserve", "As for jaxserve.main.")
_RECORD = flags.DEFINE_bool("record", False, "Append the result to results/.")


def _served(config):
  length = config.long + 8
  options = startup.StartOptions(
    model=_MODEL.value, cache_dir=pathlib.Path(_CACHE.value).expanduser(), budget=config.budget,
    other_budgets=(0,), max_num_seqs=config.streams, max_model_len=length,
    kv_cache_tokens=2 * length + config.streams * (config.tokens + 64),
    prefix_cache=False,  # the long prompt is the same every time
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
  config = run.Config(
    rounds=_ROUNDS.value, streams=_STREAMS.value, tokens=_TOKENS.value, idle=_IDLE.value,
    long=_LONG.value, budget=_BUDGET.value,
  )  # fmt: skip
  try:
    case.no_arguments(argv)
    served = _served(config)
  except ValueError as error:
    print(f"experiments.http_cost: {error}", file=sys.stderr)
    return 2
  before = provenance.load_average()
  found = {"model": _MODEL.value} | run.execute(config, served) | provenance.collect()
  found |= {"load_average_before": before, "load_average": provenance.load_average()}
  print(f"HTTP adds {found['overhead_ms']} ms to a step of {config.streams} streams")
  print(f"{config.idle} idle connections: a step takes {found['idle_ratio']} times as long")
  print(
    f"longest stall, unchunked over chunked: {found['engine_gain']} in the process, "
    f"{found['http_gain']} through HTTP"
  )
  if _RECORD.value:
    provenance.append(__file__, found)
  print(json.dumps(found))
  return 0


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("http_cost", FLAGS, flags.Error))
