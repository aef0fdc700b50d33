"""Which token buckets pad a load least: `python -m experiments.buckets --trace FILE,FILE`.

Simulates each load in virtual time, counts the tokens of every step, and finds, for several limits
on the number of executables, the buckets that cost least; beside them the default table. One row of
the table can be passed to `jaxserve.main --token_buckets`.
"""

import json
import pathlib
import sys

import numpy as np
from absl import app, flags

from experiments import case, provenance, report, served
from experiments.buckets import plot, run
from jaxserve import workload
from jaxserve.progress import progress

FLAGS = flags.FLAGS
_TRACE = flags.DEFINE_list("trace", [], "Requests of traces (csv, jsonl). Default: generated.")
_REQUESTS = flags.DEFINE_integer("requests", None, "Only so many; 1000 without a trace.")
_RATE = flags.DEFINE_float("rate", 4.0, "Requests a second, without a trace.", lower_bound=1e-6)
_BUDGET = flags.DEFINE_integer("budget", 1536, "Token budget.", lower_bound=1)
_SEATS = flags.DEFINE_integer("max_num_seqs", 64, "Requests running at once.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("max_model_len", 16384, "Most tokens of a request.", lower_bound=2)
_KV = flags.DEFINE_integer("kv_cache_tokens", 400_000, "Tokens in the KV pool.", lower_bound=1)
_MODEL = flags.DEFINE_string("model", "llama3-8b", "A name of the table, or a config.json's path.")
_DEVICE = flags.DEFINE_string("hardware", "h100", "h100, h200, a100, l40s, b200, or this.")
_POLICIES = flags.DEFINE_list("policy", ["vllm_v1"], "Scheduling policies.")
_OBJECTIVE = flags.DEFINE_enum(
  "objective", "tokens", ["tokens", "seconds"], "What the best buckets keep low."
)
_MOST = flags.DEFINE_list("most", ["8", "12", "16", "20", "24"], "Most buckets.")
_OUT = flags.DEFINE_string("out", "runs/buckets", "Where the page and its plots go.")
_RECORD = flags.DEFINE_bool("record", False, "Write to results/ of the experiment instead.")


def loads():
  """(name, the requests that fit) of each load."""
  if not _TRACE.value:
    count, rng = _REQUESTS.value or 1000, np.random.default_rng(0)
    lengths = lambda median: workload.lognormal(
      rng, count, median=median, sigma=1.0, high=_LENGTH.value // 2
    )
    arrivals = workload.gamma_arrivals(rng, count, rate=_RATE.value, cv=1.0)
    made = workload.Workload(arrival_s=arrivals, num_prompt=lengths(512), num_output=lengths(128))
    yield "generated", made
  for path in _TRACE.value:
    load = workload.read(path)
    load = load if _REQUESTS.value is None else load.first(_REQUESTS.value)
    yield pathlib.Path(path).stem, load.fitting(_LENGTH.value)


def main(argv):
  try:
    case.no_arguments(argv)
    compare_all()
  except (ValueError, OSError) as error:
    print(f"experiments.buckets: {error}", file=sys.stderr)
    return 2
  return 0


def compare_all():
  server = served.Server(
    model=_MODEL.value, hardware=_DEVICE.value, seats=_SEATS.value, length=_LENGTH.value,
    kv_tokens=_KV.value,
  )  # fmt: skip
  budget, limits = _BUDGET.value, [int(most) for most in _MOST.value]
  model, hardware = case.model(_MODEL.value), case.device(_DEVICE.value).hardware
  cost_of = run.costs(model, hardware, budget, _OBJECTIVE.value)
  rows, counts = [], {}
  for name, load in loads():
    for policy in _POLICIES.value:
      with progress(len(load), "requests", f"Simulating {name}, {policy}") as bar:
        found = run.token_counts(load, server, budget, policy, on_progress=bar.advance)
      counts[f"{name}, {policy}"] = found
      rows += [
        {"load": name, "policy": policy} | row
        for row in run.compare(found, cost_of, budget, limits)
      ]
  print(report.text_table(rows, plot.COLUMNS))
  setup = (
    f"{_MODEL.value} on one {_DEVICE.value} (roofline), budget {budget}, {_SEATS.value} seats; "
    f"buckets of least {_OBJECTIVE.value}"
  )
  made = provenance.collect()
  here = pathlib.Path(__file__).parent / "results"
  folder = here if _RECORD.value else pathlib.Path(_OUT.value)
  report.write(folder, plot.page(rows, counts, setup), made)
  result = {"budget": budget, "seats": _SEATS.value, "rows": rows} | made
  if _RECORD.value:
    provenance.append(__file__, result)
  print(f"Wrote {folder / 'report.html'}")
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("buckets", FLAGS, flags.Error))
