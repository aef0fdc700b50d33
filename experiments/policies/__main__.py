"""All policies on the same loads: `python -m experiments.policies --trace FILE --trace FILE`.

Latencies at one rate and the highest rate within objectives, for every policy and load. Writes
drawings and report.html to runs/policies, or with --record to results/. What is in results.jsonl is
not run again.
"""

from absl import app, flags

from experiments import case, flow
from experiments.policies import config, plot, run

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_TRACES = flags.DEFINE_multi_string("trace", [], "Azure CSV, Mooncake or LLMServingSim JSONL.")
_POLICIES = flags.DEFINE_list("policy", list(_DEFAULT.policies), "Names.")
_REQUESTS = flags.DEFINE_integer("requests", _DEFAULT.requests, "Of each load.", lower_bound=2)
_RATE = flags.DEFINE_float("rate", None, "Requests a second; by default the load's own.")
_BUDGET = flags.DEFINE_integer("budget", _DEFAULT.budget, "Where prompts are cut.", lower_bound=1)
_ITL = flags.DEFINE_float("itl_slo_ms", _DEFAULT.itl_slo_ms, "Objective of every gap.")
_TTFT = flags.DEFINE_float("ttft_slo_ms", _DEFAULT.ttft_slo_ms, "Objective of the first token.")
_SHARE = flags.DEFINE_float("share", _DEFAULT.share, "Of the requests that must keep both.")
_OUT = flags.DEFINE_string("out", None, "Folder of the results. Default: runs/policies.")
_RECORD = flags.DEFINE_bool("record", False, "Keep the results in the experiment's results/.")


def main(argv):
  chosen = lambda: config.Config(
    policies=tuple(_POLICIES.value), traces=tuple(_TRACES.value), requests=_REQUESTS.value,
    rate=_RATE.value, budget=_BUDGET.value, itl_slo_ms=_ITL.value, ttft_slo_ms=_TTFT.value,
    share=_SHARE.value,
  )  # fmt: skip
  return flow.execute(
    __file__, argv, chosen, run.run, plot.page, out=_OUT.value, record=_RECORD.value
  )


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("policies", FLAGS, flags.Error))
