"""Open-loop load on an OpenAI-compatible server: `python -m experiments.load --url URL --rate 4`.

Requests go out at their times, whatever has come back: Poisson arrivals, bursts (--burstiness
under 1), or those of a trace. Prints latencies and goodput, and one JSON line with the key names of
vLLM's `bench serve`; writes result.json and report.html. It also says how late it sent itself: a
client that lags measures itself.
"""

import dataclasses
import json
import pathlib
import sys
import time

import numpy as np
from absl import app, flags

from experiments import case, provenance, report
from experiments.load import plot, run
from jaxserve import metrics, workload

FLAGS = flags.FLAGS
_URL = flags.DEFINE_string("url", "http://127.0.0.1:8000", "Of the server, without /v1.")
_MODEL = flags.DEFINE_string("model", None, "Its name. Default: the first that is listed.")
_ENDPOINT = flags.DEFINE_enum("endpoint", "completions", ["completions", "chat"], "Which.")
_RATE = flags.DEFINE_float("rate", 1.0, "Requests a second; inf: all at once.", lower_bound=1e-6)
_BURSTINESS = flags.DEFINE_float(
  "burstiness", 1.0, "Shape of the gaps' gamma distribution; 1 is Poisson.", lower_bound=1e-3
)
_TRACE = flags.DEFINE_string("trace", None, "Azure CSV, Mooncake or LLMServingSim JSON lines.")
_FASTER = flags.DEFINE_float("faster", 1.0, "Divides the times of the trace.", lower_bound=1e-6)
_REQUESTS = flags.DEFINE_integer("requests", 100, "How many count.", lower_bound=1)
_WARM_UP = flags.DEFINE_integer("warm_up", 5, "Requests before them.", lower_bound=0)
_LENGTHS = flags.DEFINE_list(
  "lengths", ["128", "32"], "Tokens of prompt and output; 64:256 is anything between."
)
_MAX_TOTAL = flags.DEFINE_integer("max_model_len", None, "Leaves longer requests out.")
_SLO = flags.DEFINE_list("slo", [], "Objectives in seconds: ttft=2,itl=0.2,tpot=0.1,e2e=30.")
_TIMEOUT = flags.DEFINE_float("timeout_s", 600.0, "Of a request.", lower_bound=0.1)
_KEY = flags.DEFINE_string("api_key", None, "Bearer token.")
_EOS = flags.DEFINE_bool("ignore_eos", True, "Outputs have their full length.")
_SEED = flags.DEFINE_integer("seed", 0, "Of arrivals, lengths and prompts.")
_OUT = flags.DEFINE_string("out", "runs/load", "Folder of the results.")


def _lengths(rng, count, words):
  if len(words) != 2:
    raise ValueError(f"lengths={','.join(words)}: must be prompt,output, such as 64:256,32")
  columns = []
  for word in words:
    low, _, high = word.partition(":")
    try:
      columns.append(workload.uniform(rng, count, low=int(low), high=int(high or low)))
    except ValueError:
      raise ValueError(f"lengths={word}: must be a number or LOW:HIGH") from None
  return columns


def _load():
  count, rng = _WARM_UP.value + _REQUESTS.value, np.random.default_rng(_SEED.value)
  if _TRACE.value is not None:
    load = workload.read(pathlib.Path(_TRACE.value)).faster(_FASTER.value)
    load = load.fitting(_MAX_TOTAL.value) if _MAX_TOTAL.value else load
    if len(load) <= _WARM_UP.value:
      raise ValueError(f"warm_up={_WARM_UP.value}: the trace has {len(load)} requests that fit")
    return load.first(count)
  times = run.arrivals(rng, count, _RATE.value, _BURSTINESS.value)
  prompt, output = _lengths(rng, count, _LENGTHS.value)
  return workload.Workload(arrival_s=times, num_prompt=prompt, num_output=output)


def _slo():
  given = {}
  for pair in _SLO.value:
    name, _, value = pair.partition("=")
    try:
      if name not in ("ttft", "itl", "tpot", "e2e"):
        raise ValueError
      given[f"{name}_s"] = float(value)
    except ValueError:
      raise ValueError(f"slo={pair}: must be ttft, itl, tpot or e2e = seconds") from None
  return metrics.Slo(**given) if given else None


def main(argv):
  try:
    case.no_arguments(argv)
    config = run.Config(
      url=_URL.value.rstrip("/"), model=_MODEL.value, endpoint=_ENDPOINT.value,
      warm_up=_WARM_UP.value, slo=_slo(), timeout_s=_TIMEOUT.value, key=_KEY.value,
      seed=_SEED.value, ignore_eos=_EOS.value,
    )  # fmt: skip
    load = _load()
    sent = run.execute(config, load)
  except (ValueError, OSError) as error:
    print(f"experiments.load: {error}", file=sys.stderr)
    return 2
  found = run.summary(config, load, sent) | {"date": time.strftime("%Y-%m-%d")}
  print(report.text_table(plot.rows(found), plot.COLUMNS))
  print("\n".join(plot.findings(found)))
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  details = [dataclasses.asdict(one) for one in sent]
  (out / "result.json").write_text(json.dumps(found | {"requests": details}), "utf-8")
  try:
    report.write(out, plot.page(config, found, sent), {"load_average": provenance.load_average()})
    print(f"Wrote {out / 'report.html'} and result.json")
  except ImportError:
    print(f"Wrote {out / 'result.json'}; drawings take matplotlib: pip install 'jaxserve[plot]'")
  print(json.dumps(found))
  return 1 if found["failed"] else 0


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("load", FLAGS, flags.Error))
