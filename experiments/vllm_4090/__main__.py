"""A measured vLLM run against the simulator: `python -m experiments.vllm_4090 --traces_dir DIR`.

DIR has LLMServingSim's recorded requests and profile of an RTX 4090. Prints errors, and writes
drawings and report.html to runs/vllm_4090, or with --record to results/.
"""

from absl import app, flags

from experiments import case, flow
from experiments.vllm_4090 import config, plot, run

FLAGS = flags.FLAGS
_TRACES = flags.DEFINE_string("traces_dir", None, f"Folder of {config.STEM}_*.")
_HOST = flags.DEFINE_float("host_ms", 0.0, "Time of a step that no table has.", lower_bound=0.0)
_OUT = flags.DEFINE_string("out", None, "Folder of the results. Default: runs/vllm_4090.")
_RECORD = flags.DEFINE_bool("record", False, "Keep the results in the experiment's results/.")


def configure():
  if _TRACES.value is None:
    raise ValueError(f"traces_dir=None: give the folder of {config.STEM}_vllm_requests.jsonl")
  return config.Config(traces_dir=_TRACES.value, host_ms=_HOST.value)


def main(argv):
  return flow.execute(
    __file__, argv, configure, run.run, plot.page, out=_OUT.value, record=_RECORD.value
  )


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("vllm_4090", FLAGS, flags.Error))
