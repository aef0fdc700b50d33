"""jaxserve's own engine, as a worker; run with the repository on the path."""

import importlib.metadata
import pathlib

import jax
import protocol

import jaxserve
from jaxserve import sched
from jaxserve.engine import SamplingParams, devices, startup


class Jaxserve:
  """The engine as `jaxserve.main` starts it, in bfloat16 and without a prefix cache."""

  def load(self, model, options):
    devices.set_up()
    longest, chunk = options["max_model_len"], options.get("chunk")
    started = startup.start(
      startup.StartOptions(
        model=model,
        cache_dir=pathlib.Path(options["compile_cache"]),
        dtype="bfloat16",
        budget=chunk or longest,
        other_budgets=() if options.get("only_chunk") else (longest,),
        max_num_seqs=options["max_num_seqs"],
        max_model_len=longest,
        kv_cache_tokens=options["kv_cache_tokens"],
        prefix_cache=False,
      )
    )
    self._engine, self._keys = started.engine, {}
    if not options.get("only_chunk"):
      self._engine.warm_up()
    versions = {"jaxserve": jaxserve.__version__, "jax": jax.__version__}
    if self._engine.config.attention == "numba":
      versions["numba"] = importlib.metadata.version("numba")
    return {
      "versions": versions,
      "load_s": started.load_s, "compile_s": started.compile_s,
      "weight_bytes": started.weight_bytes,
      "kv_bytes_per_token": startup.kv_bytes_per_token(self._engine.config),
    }  # fmt: skip

  def set_chunk(self, chunk):
    config = self._engine.config.scheduler
    self._engine.set_params(sched.make_params(config, budget=chunk or config.max_budget))

  def submit(self, key, prompt, tokens):
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    self._keys[self._engine.submit(prompt, sampling)] = key

  def step(self):
    events = self._engine.step()
    assert events is not None, "nothing is left to compute"
    return [(self._keys[event.request_id], [event.token]) for event in events.outputs]


if __name__ == "__main__":
  protocol.main(Jaxserve())
