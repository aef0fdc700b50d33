"""The shape of published results: `python -m experiments.sarathi_tables`.

Sarathi-Serve's Table 4 and capacity gains, and prefill-first against mixed on Qwen3-32B. Writes
drawings and report.html to runs/sarathi_tables, or with --record to results/. What is in
results.jsonl is not run again.
"""

from absl import app, flags

from experiments import case, flow
from experiments.sarathi_tables import config, plot, run

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_SEEDS = flags.DEFINE_integer("seeds", _DEFAULT.seeds, "Loads of Table 4.", lower_bound=1)
_CAPACITY = flags.DEFINE_bool("capacity", True, "Search capacities, the longest part.")
_REQUESTS = flags.DEFINE_integer(
  "requests", _DEFAULT.capacity_requests, "Of a capacity search.", lower_bound=2
)
_OUT = flags.DEFINE_string("out", None, "Folder of the results. Default: runs/sarathi_tables.")
_RECORD = flags.DEFINE_bool("record", False, "Keep the results in the experiment's results/.")


def main(argv):
  chosen = lambda: config.Config(
    seeds=_SEEDS.value, capacity=_CAPACITY.value, capacity_requests=_REQUESTS.value
  )
  return flow.execute(
    __file__, argv, chosen, run.run, plot.page, out=_OUT.value, record=_RECORD.value
  )


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("sarathi_tables", FLAGS, flags.Error))
