"""Loads that chunking does nothing for: `python -m experiments.when_it_does_not_help`.

Uniform short prompts, an offline batch, and for comparison a load that gains. Writes drawings and
report.html to runs/when_it_does_not_help, or with --record to results/.
"""

from absl import app, flags

from experiments import case, flow
from experiments.when_it_does_not_help import config, plot, run

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_REQUESTS = flags.DEFINE_integer("requests", _DEFAULT.requests, "Of each load.", lower_bound=1)
_BUDGETS = flags.DEFINE_list("budget", list(map(str, _DEFAULT.budgets)), "Of the chunked runs.")
_OUT = flags.DEFINE_string("out", None, "Folder of the results.")
_RECORD = flags.DEFINE_bool("record", False, "Keep the results in the experiment's results/.")


def main(argv):
  chosen = lambda: config.Config(
    requests=_REQUESTS.value, budgets=case.numbers("budget", _BUDGETS.value)
  )
  return flow.execute(
    __file__, argv, chosen, run.run, plot.page, out=_OUT.value, record=_RECORD.value
  )


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("when_it_does_not_help", FLAGS, flags.Error))
