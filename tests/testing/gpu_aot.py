"""Compiles for an H100 or H200 that is not there, in a process of its own, and reports on it.

XLA, Mosaic and ptxas run as they do beside a GPU; nothing is executed. A process of its own: Mosaic
keeps what it compiled, and reads where to dump it when it is imported.

  python -m tests.testing.gpu_aot kernels --model=llama3-8b --tokens=64,1536 --target=h100
  python -m tests.testing.gpu_aot step --tokens=512 --target=h200
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

TARGETS = pathlib.Path(__file__).parent / "gpu_targets"
_COPY = re.compile(r"= \w+\[([\d,]+)\]\S* copy(?:-start)?\(")
SPILL_IS_AN_ERROR = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"


def missing() -> str | None:
  """Which part of the extra `gpu-aot` is not installed, if any."""
  if importlib.util.find_spec("jax_plugins") is None or not importlib.util.find_spec(
    "jax_plugins.xla_cuda13"
  ):
    return "the wheel jax-cuda13-plugin (extra gpu-aot)"
  wheels = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
  if wheels is None and shutil.which("ptxas") is None:
    return "ptxas (wheel nvidia-cuda-nvcc, extra gpu-aot)"
  return None


def run(*arguments: str, timeout: float = 300) -> dict:
  """The report of one compilation in a child process."""
  with tempfile.TemporaryDirectory() as dump:
    environment = dict(
      os.environ, JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1",
      MOSAIC_GPU_DUMP_TO=dump, XLA_FLAGS=SPILL_IS_AN_ERROR,
    )  # fmt: skip
    child = subprocess.run(
      [sys.executable, "-m", "tests.testing.gpu_aot", *arguments],
      env=environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    if child.returncode:
      raise AssertionError(f"gpu_aot {' '.join(arguments)} failed:\n{child.stderr[-4000:]}")
    return {**json.loads(child.stdout.splitlines()[-1]), "kernels": _kernels(pathlib.Path(dump))}


def _kernels(dump: pathlib.Path) -> list[dict]:
  """What ptxas said of each kernel, and which instructions it uses."""
  found = []
  for path in sorted(dump.glob("*.ptx")):
    ptx, log = path.read_text(), path.with_suffix(".ptxas").read_text()
    passes = path.with_suffix(".mlir-passes.log")
    [shared] = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes.read_text())[:1] or [0]
    found.append(
      {
        "name": re.sub(r"_\d+$", "", path.stem),
        "target": re.search(r"\.target (\w+)", ptx)[1],
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "shared_memory": int(shared),
        "wgmma": "wgmma.mma_async" in ptx,
        "tma_loads": bool(re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared::", ptx)),
        "tma_stores": bool(re.search(r"cp\.async\.bulk\.tensor\.\dd\.global", ptx)),
      }
    )
  return found


def compile_for(target: str, function, arguments, donate=()):
  """Compiles `function(**arguments)`, abstract arrays by name, for the description of a GPU."""
  import jax
  from jax.experimental import topologies

  description = (TARGETS / f"{target}.txtpb").read_text()
  topology = topologies.get_topology_desc(
    platform="cuda", target_config=description, topology="1x1x1"
  )
  mesh = topologies.make_mesh(topology, (1,), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  placed = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
  )
  with jax.set_mesh(mesh):
    return jax.jit(function, donate_argnames=donate).lower(**placed).compile()


def compile_kernels(model: str, tokens: str, target: str, page_size: int) -> dict:
  import jax
  import jax.numpy as jnp

  from pallas_kernels.kv_write import mosaic_gpu as kv_write
  from pallas_kernels.ragged_paged_attention import arg_specs, mosaic_gpu

  for count in map(int, tokens.split(",")):
    spec = arg_specs.of_model(model, count, page_size=page_size)
    arrays = spec.arrays()
    attention = functools.partial(mosaic_gpu.ragged_paged_attention, **spec.options())
    compile_for(target, attention, arrays)
    new = jax.ShapeDtypeStruct((count, spec.kv_heads, spec.head_dim), arrays["q"].dtype)
    write = functools.partial(kv_write.kv_write, num_slots=spec.num_pages * page_size)
    stored = {name: arrays[name] for name in ("k_pages", "v_pages")}
    slots = jax.ShapeDtypeStruct((count,), jnp.int32)
    compile_for(
      target, write, {**stored, "k": new, "v": new, "slot_mapping": slots}, donate=tuple(stored)
    )
  return {}


def compile_step(tokens: str, target: str) -> dict:
  """The whole forward pass of a model with the layers of Llama-3-8B, but two of them."""
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from jaxserve.config import (
    CacheConfig,
    ModelConfig,
    PlanShape,
    SchedulerConfig,
    SplitKV,
    TargetDescription,
  )
  from jaxserve.model import kv_cache, llama, step
  from jaxserve.types.plan import packed_size

  dtype = jnp.dtype("bfloat16")
  model = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=2, num_heads=32,
    num_kv_heads=8, head_dim=128,
  )  # fmt: skip
  cache = CacheConfig(num_pages=4096, page_size=64)
  scheduler = SchedulerConfig(
    cache=cache, max_num_seqs=min(64, int(tokens)), max_requests=128, max_budget=int(tokens),
    max_model_len=8192,
  )  # fmt: skip
  splits = SplitKV.of(TargetDescription(num_sms=132), model.num_kv_heads)
  shape = PlanShape.of(scheduler, int(tokens), 128, splits)
  graphdef, _ = nnx.split(nnx.eval_shape(lambda: llama.Llama(model, dtype)))
  abstract = {
    name: jax.ShapeDtypeStruct(dims, dtype) for name, dims in llama.param_shapes(model).items()
  }
  forward = functools.partial(
    step.forward, graphdef=graphdef, config=model, shape=shape, dtype=dtype,
    attention="mosaic_gpu", unroll=True,
  )  # fmt: skip
  arguments = {
    "leaves": jax.eval_shape(lambda params: llama.load(model, params, dtype)[1], abstract),
    "kv": jax.eval_shape(lambda: kv_cache.init_kv(model, cache, dtype, "gpu")),
    "token_table": jax.ShapeDtypeStruct((128, 8192), jnp.int32),
    "packed_plan": jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32),
  }
  compiled = compile_for(target, forward, arguments, donate=("kv",))
  memory, pool = compiled.memory_analysis(), arguments["kv"].k
  sizes = [math.prod(map(int, dims.split(","))) for dims in _COPY.findall(compiled.as_text())]
  return {
    "kv_bytes": 2 * pool.size * pool.dtype.itemsize,
    "alias_bytes": memory.alias_size_in_bytes,
    "temp_bytes": memory.temp_size_in_bytes,
    "largest_copy": max(sizes, default=0),
    "layer_elements": pool.size // model.num_layers,
  }


if __name__ == "__main__":
  parser = argparse.ArgumentParser()
  commands = parser.add_subparsers(required=True)
  kernels = commands.add_parser("kernels")
  kernels.set_defaults(function=compile_kernels)
  kernels.add_argument("--model", required=True)
  kernels.add_argument("--page_size", type=int, default=64)
  step_command = commands.add_parser("step")
  step_command.set_defaults(function=compile_step)
  for command in (kernels, step_command):
    command.add_argument("--tokens", required=True)
    command.add_argument("--target", required=True)
  chosen = vars(parser.parse_args())
  print(json.dumps(chosen.pop("function")(**chosen)))
