"""Prefill and decode on GPUs of their own, as a what-if: `python -m experiments.disaggregation`.

Simulates the same GPUs alike and split, at several rates, and several links between them. Writes
drawings and report.html to runs/disaggregation, or with --record to results/.
"""

from absl import app, flags

from experiments import case, flow
from experiments.disaggregation import config, plot, run

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_TRACE = flags.DEFINE_string("trace", None, "Azure CSV, Mooncake or LLMServingSim JSONL.")
_REQUESTS = flags.DEFINE_integer("requests", _DEFAULT.requests, "Of the load.", lower_bound=2)
_GPUS = flags.DEFINE_integer("gpus", _DEFAULT.gpus, "Of every deployment.", lower_bound=2)
_RATES = flags.DEFINE_list("rate", list(map(str, _DEFAULT.rates)), "Requests a second.")
_LINK = flags.DEFINE_float("link_gb_s", _DEFAULT.link_gb_s, "Out of each GPU that prefills.")
_OUT = flags.DEFINE_string("out", None, "Folder of the results. Default: runs/disaggregation.")
_RECORD = flags.DEFINE_bool("record", False, "Keep the results in the experiment's results/.")


def main(argv):
  chosen = lambda: config.Config(
    trace=_TRACE.value, requests=_REQUESTS.value, gpus=_GPUS.value, link_gb_s=_LINK.value,
    prefill=tuple(range(_GPUS.value)), link_prefill=max(_GPUS.value // 2, 1),
    rates=case.numbers("rate", _RATES.value, float),
  )  # fmt: skip
  return flow.execute(
    __file__, argv, chosen, run.run, plot.page, out=_OUT.value, record=_RECORD.value
  )


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("disaggregation", FLAGS, flags.Error))
