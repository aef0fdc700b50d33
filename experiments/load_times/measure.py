"""One load in a process of its own, since a process's peak of memory never falls."""

import dataclasses
import gc
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from jaxserve.config import ModelConfig

# The shape of Llama-3.2-1B: 1.24e9 parameters.
LLAMA_1B = ModelConfig(
  vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32,
  num_kv_heads=8, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
  """What one load took.

  Attributes:
    seconds: from the path to arrays on the device.
    file_bytes: of the weights as stored.
    peak_bytes: by how much the process grew at most, the arrays on a CPU included.
  """

  seconds: float
  file_bytes: int
  peak_bytes: int

  @property
  def gb_s(self) -> float:
    """Stored gigabytes a second."""
    return self.file_bytes / self.seconds / 1e9

  @property
  def peak_share(self) -> float:
    """Growth in units of the stored weights."""
    return self.peak_bytes / self.file_bytes


def write_checkpoint(directory: Path, config: ModelConfig, num_shards: int = 4) -> None:
  """A Hugging Face directory of bfloat16 weights whose values repeat, so writing is fast."""
  import ml_dtypes
  from safetensors.numpy import save_file

  from experiments.parity_goldens.reference import hf_config, hf_tensors
  from jaxserve.model.llama import param_shapes

  directory.mkdir(parents=True)
  shapes = param_shapes(config)
  longest = max(int(np.prod(shape)) for shape in shapes.values())
  noise = np.random.default_rng(0).standard_normal(1 << 16, dtype=np.float32) / 50
  values = np.resize(noise.astype(ml_dtypes.bfloat16), longest)
  params = {name: values[: int(np.prod(shape))].reshape(shape) for name, shape in shapes.items()}
  tensors = hf_tensors(config, params)
  if config.tie_word_embeddings:
    del tensors["lm_head.weight"]
  names, weight_map = list(tensors), {}
  for shard in range(num_shards):
    file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
    part = {name: np.ascontiguousarray(tensors[name]) for name in names[shard::num_shards]}
    save_file(part, directory / file)
    weight_map |= dict.fromkeys(part, file)
  index = {"metadata": {}, "weight_map": weight_map}
  (directory / "model.safetensors.index.json").write_text(json.dumps(index))
  (directory / "config.json").write_text(json.dumps(hf_config(config)))
  (directory / "tokenizer.json").write_text("{}")


def stored_bytes(model: Path) -> int:
  """Bytes of the weights of a file or directory."""
  if model.is_file():
    return model.stat().st_size
  files = [*model.glob("*.safetensors"), *(model / "params").rglob("*")]
  return sum(path.stat().st_size for path in files if path.is_file())


def load_here(model: str, dtype: str) -> Load:
  """Loads the model in this process; Linux only, whose kernel tells the peak of memory."""
  import jax
  import jax.numpy as jnp
  import orbax.checkpoint  # noqa: F401

  from jaxserve.model import llama, source

  jnp.zeros(8).block_until_ready()  # Neither the backend's own memory nor imports are the model's.
  gc.collect()
  Path("/proc/self/clear_refs").write_text("5")
  before = _memory("VmRSS")
  begin = time.perf_counter()
  if model.endswith(".gguf"):  # Each time from the file itself, not from what it was converted to.
    checkpoint, _ = source.open_checkpoint(model, Path("unused"))
  else:
    checkpoint = source.load_checkpoint(model, Path("unused"), dtype)
  _, leaves = llama.load(checkpoint.config, checkpoint.params, jnp.dtype(dtype))
  jax.block_until_ready(leaves)
  seconds = time.perf_counter() - begin
  return Load(
    seconds=seconds,
    file_bytes=stored_bytes(Path(model)),
    peak_bytes=_memory("VmHWM") - before,
  )


def _memory(field: str) -> int:
  """Bytes of this process's memory: VmRSS now, VmHWM the most since the last reset."""
  lines = Path("/proc/self/status").read_text().splitlines()
  (line,) = (line for line in lines if line.startswith(f"{field}:"))
  return int(line.split()[1]) * 1024


def load(model: str, dtype: str = "bfloat16") -> Load:
  """Loads the model in a process of its own."""
  code = (
    "import dataclasses, json, sys; from experiments.load_times import measure; "
    "print(json.dumps(dataclasses.asdict(measure.load_here(*sys.argv[1:]))))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, model, dtype], capture_output=True, text=True, check=False
  )
  if done.returncode:
    raise RuntimeError(done.stderr)
  return Load(**json.loads(done.stdout.splitlines()[-1]))
