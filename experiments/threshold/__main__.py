"""What long_prefill_token_threshold does: `python -m experiments.threshold`.

Simulates a grid of thresholds and budgets at once. Writes drawings and report.html to
runs/threshold, or with --record to results/.
"""

from absl import app, flags

from experiments import case, flow
from experiments.threshold import config, plot, run

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_REQUESTS = flags.DEFINE_integer("requests", _DEFAULT.requests, "Of the load.", lower_bound=1)
_RATE = flags.DEFINE_float("rate", _DEFAULT.rate, "Requests a second.")
_BUDGETS = flags.DEFINE_list("budget", list(map(str, _DEFAULT.budgets)), "Token budgets.")
_THRESHOLDS = flags.DEFINE_list(
  "long_prefill_token_threshold", list(map(str, _DEFAULT.thresholds)), "Caps; 0: none."
)
_OUT = flags.DEFINE_string("out", None, "Folder of the results. Default: runs/threshold.")
_RECORD = flags.DEFINE_bool("record", False, "Keep the results in the experiment's results/.")


def main(argv):
  chosen = lambda: config.Config(
    requests=_REQUESTS.value, rate=_RATE.value,
    budgets=case.numbers("budget", _BUDGETS.value),
    thresholds=case.numbers("long_prefill_token_threshold", ["0", *_THRESHOLDS.value]),
  )  # fmt: skip
  return flow.execute(
    __file__, argv, chosen, run.run, plot.page, out=_OUT.value, record=_RECORD.value
  )


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("threshold", FLAGS, flags.Error))
