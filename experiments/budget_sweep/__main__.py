"""ITL and TTFT against the token budget: `python -m experiments.budget_sweep [--trace FILE]`.

Simulates one load under many budgets at once, prints a table, and writes drawings and report.html
to runs/budget_sweep, or with --record to results/. What is in results.jsonl is not run again.
"""

from absl import app, flags

from experiments import case, flow
from experiments.budget_sweep import config, plot, run

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_TRACE = flags.DEFINE_string("trace", None, "Azure CSV, Mooncake or LLMServingSim JSONL.")
_REQUESTS = flags.DEFINE_integer("requests", _DEFAULT.requests, "Of the load.", lower_bound=1)
_RATE = flags.DEFINE_float("rate", _DEFAULT.rate, "Requests a second, without a trace.")
_SPEED = flags.DEFINE_float("speed", 1.0, "Factor on the rate of the trace.", lower_bound=1e-6)
_BUDGETS = flags.DEFINE_list("budget", list(map(str, _DEFAULT.budgets)), "Token budgets.")
_ITL = flags.DEFINE_float("itl_slo_ms", _DEFAULT.itl_slo_ms, "Objective of every gap.")
_TTFT = flags.DEFINE_float("ttft_slo_ms", _DEFAULT.ttft_slo_ms, "Objective of the first token.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the generated load.")
_OUT = flags.DEFINE_string("out", None, "Folder of the results. Default: runs/budget_sweep.")
_RECORD = flags.DEFINE_bool("record", False, "Keep the results in the experiment's results/.")


def main(argv):
  chosen = lambda: config.Config(
    budgets=case.numbers("budget", _BUDGETS.value), itl_slo_ms=_ITL.value,
    ttft_slo_ms=_TTFT.value, trace=_TRACE.value, requests=_REQUESTS.value, rate=_RATE.value,
    speed=_SPEED.value, seed=_SEED.value,
  )  # fmt: skip
  return flow.execute(
    __file__, argv, chosen, run.run, plot.page, out=_OUT.value, record=_RECORD.value
  )


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("budget_sweep", FLAGS, flags.Error))
