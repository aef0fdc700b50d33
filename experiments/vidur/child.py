"""Runs Vidur on a trace, in an interpreter that has it, and prints one line of JSON.

Vidur's wheel brings no profiles of devices, so its step times come from a roofline of Llama-3-8B on
an H100, the same formulas as `jaxserve.sim.roofline`. Its reports are left out of the time.

  python child.py TRACE.csv CHUNK SEATS MAX_TOKENS OUTPUT_DIR
"""

import json
import sys
import time

from vidur.config import SimulationConfig
from vidur.execution_time_predictor import (
  BaseExecutionTimePredictor,
  ExecutionTimePredictorRegistry,
)
from vidur.simulator import Simulator
from vidur.types import ExecutionTimePredictorType

PARAMS, LAYERS, WIDTH, KV_BYTES = 8.03e9, 32, 4096, 131072
FLOPS, BANDWIDTH = 500e12, 2.6e12
STEPS = [0]


class Roofline(BaseExecutionTimePredictor):
  """All of a layer's time, in milliseconds, under one of the names that Vidur adds up."""

  def _get_attention_layer_pre_proj_execution_time(self, batch):
    STEPS[0] += 1
    tokens = sum(batch.num_q_tokens)
    rows = list(zip(batch.num_q_tokens, batch.num_kv_tokens, strict=True))
    attended = sum(q * (k + q / 2) for q, k in rows if q > 1)
    resident = sum(k for q, k in rows if q == 1)
    weights = max(2 * PARAMS * tokens / FLOPS, 2 * PARAMS / BANDWIDTH)
    attention = 4 * LAYERS * WIDTH * attended / FLOPS + resident * KV_BYTES / BANDWIDTH
    return 1e3 * (weights + attention) / LAYERS


for _name in BaseExecutionTimePredictor.__abstractmethods__:
  if _name not in vars(Roofline):
    setattr(Roofline, _name, lambda self, batch: 0.0)
Roofline.__abstractmethods__ = frozenset()


def main():
  trace, chunk, seats, longest, output = sys.argv[1:]
  sys.argv[1:] = [
    "--request_generator_config_type=trace_replay",
    f"--trace_request_generator_config_trace_file={trace}",
    "--trace_request_generator_config_date=all",
    "--trace_request_generator_config_prefill_scale_factor=1",
    "--trace_request_generator_config_time_scale_factor=1",
    f"--trace_request_generator_config_max_tokens={longest}",
    "--replica_config_num_pipeline_stages=1",
    "--replica_config_tensor_parallel_size=1",
    "--replica_config_device=h100",
    "--replica_scheduler_config_type=sarathi",
    f"--sarathi_scheduler_config_chunk_size={chunk}",
    f"--sarathi_scheduler_config_batch_size_cap={seats}",
    "--no-random_forrest_execution_time_predictor_config_use_native_execution_time_predictor",
    "--no-metrics_config_store_plots",
    "--no-metrics_config_enable_chrome_trace",
    "--no-metrics_config_write_metrics",
    f"--metrics_config_output_dir={output}",
  ]
  kind = ExecutionTimePredictorType.RANDOM_FORREST
  ExecutionTimePredictorRegistry.unregister(kind)
  ExecutionTimePredictorRegistry.register(kind, Roofline)
  simulator = Simulator(SimulationConfig.create_from_cli_args())
  simulator._write_output = lambda: None
  begin = time.perf_counter()
  simulator.run()
  seconds = time.perf_counter() - begin
  print(json.dumps({"steps": STEPS[0], "seconds": seconds, "end_s": simulator._time}))


if __name__ == "__main__":
  main()
