"""OpenVINO GenAI's continuous batching, as a worker: weights, products and KV in bfloat16."""

import importlib.metadata

import numpy as np
import openvino
import openvino_genai
import protocol


class OpenVino:
  """A pipeline with dynamic split-fuse; another bound of a step takes another pipeline."""

  def load(self, model, options):
    self._model, self._options, self._number = model, options, 0
    self._chunk, self._pipeline = 0, None
    self.set_chunk(options.get("chunk"))
    names = ("openvino", "openvino-genai")
    return {"versions": {name: importlib.metadata.version(name) for name in names}}

  def set_chunk(self, chunk):
    if chunk == self._chunk:
      return
    self._pipeline, self._chunk = None, chunk
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = chunk or self._options["max_model_len"]
    scheduler.max_num_seqs = self._options["max_num_seqs"]
    scheduler.num_kv_blocks = -(-self._options["kv_cache_tokens"] // _BLOCK_SIZE)
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    if self._options.get("compile_cache"):
      properties["CACHE_DIR"] = self._options["compile_cache"]
    self._pipeline = openvino_genai.ContinuousBatchingPipeline(
      self._model, scheduler, "CPU", properties
    )
    self._handles = {}

  def submit(self, key, prompt, tokens):
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.ignore_eos = True
    config.set_eos_token_id(2)  # It refuses to have none.
    config.do_sample = False
    config.apply_chat_template = False
    ids = openvino.Tensor(np.asarray([prompt], np.int64))
    self._handles[key] = self._pipeline.add_request(self._number, ids, config)
    self._number += 1

  def step(self):
    self._pipeline.step()
    found = []
    for key, handle in list(self._handles.items()):
      tokens = []
      while handle.can_read():
        for output in handle.read().values():
          tokens += list(output.generated_ids)
      if tokens:
        found.append((key, tokens))
      if handle.get_status() == openvino_genai.GenerationStatus.FINISHED:
        del self._handles[key]
    return found


_BLOCK_SIZE = 32  # of OpenVINO's paged attention on a CPU

if __name__ == "__main__":
  protocol.main(OpenVino())
