"""One long prompt among streams, chunked and not: `python -m experiments.stall`.

Simulates the reference case (Llama-3-8B on one H100) under several budgets and unchunked, and
writes drawings and report.html to runs/stall, or with --record to results/. With --engine it runs
the experiment of `python -m jaxserve.main` on the real engine of this machine instead.
"""

from absl import app, flags

from experiments import case, flow
from experiments.stall import config, live, plot, run

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_BUDGETS = flags.DEFINE_list("budget", list(map(str, _DEFAULT.budgets)), "Token budgets.")
_DECODERS = flags.DEFINE_integer("decoders", _DEFAULT.decoders, "Streams.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", _DEFAULT.context, "Tokens of each.", lower_bound=128)
_PROMPT = flags.DEFINE_integer("prompt", _DEFAULT.prompt, "Of the long prompt.", lower_bound=2)
_ENGINE = flags.DEFINE_bool("engine", False, "Run the real engine, not the simulator.")
_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Of the engine; as for jaxserve.main.")
_ENGINE_FLAGS = flags.DEFINE_list("engine_flags", [], "More flags for jaxserve.main.")
_OUT = flags.DEFINE_string("out", None, "Folder of the results. Default: runs/stall.")
_RECORD = flags.DEFINE_bool("record", False, "Keep the results in the experiment's results/.")


def main(argv):
  budgets = lambda: case.numbers("budget", _BUDGETS.value)
  if _ENGINE.value:
    chosen = lambda: live.Config(
      budgets=budgets() if FLAGS["budget"].present else live.Config().budgets,
      model=_MODEL.value, flags=tuple(_ENGINE_FLAGS.value),
    )  # fmt: skip
    steps = live.run, live.page
  else:
    chosen = lambda: config.Config(
      budgets=budgets(), decoders=_DECODERS.value, context=_CONTEXT.value, prompt=_PROMPT.value
    )
    steps = run.run, plot.page
  return flow.execute(__file__, argv, chosen, *steps, out=_OUT.value, record=_RECORD.value)


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("stall", FLAGS, flags.Error))
