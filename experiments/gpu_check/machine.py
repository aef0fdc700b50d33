"""What the machine is, and its two ceilings: how fast it copies and how fast it multiplies."""

import importlib.metadata
import os
import platform
import subprocess

import jax
import jax.numpy as jnp
import numpy as np

from experiments import provenance
from experiments.gpu_check import batches, timing

_PACKAGES = (
  "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy", "torch", "triton",
  "nvidia-cudnn-cu13", "nvidia-cublas", "flashinfer-python", "flash-attn", "matplotlib",
)  # fmt: skip


def cases(settings, records):
  del records
  yield "facts", facts
  yield "copy", lambda: copy(settings)
  yield "matmul", lambda: matmul(settings)


def facts():
  device = jax.devices()[0]
  memory = device.memory_stats() or {}
  return {
    "facts": {
      **provenance.collect(),
      "platform": device.platform,
      "compute_capability": str(getattr(device, "compute_capability", "none")),
      "sms": int(getattr(device, "core_count", 0) or 0),
      "sms_planned_for": batches.num_sms(device),
      "memory_gb": round(memory.get("bytes_limit", 0) / 1e9, 1),
      "driver": _smi("driver_version"),
      "clocks": _smi("clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"),
      "python": platform.python_version(),
      "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }
  }


def _version(name):
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _smi(query):
  command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
  except (OSError, subprocess.TimeoutExpired):
    return "unknown"
  return done.stdout.strip().split("\n")[0] or "unknown"


def copy(settings):
  """Bytes read and written a second: a plain copy, and a fused kernel that reads and writes."""
  count = settings.copy_bytes // 4
  data = jax.jit(lambda: jax.random.bits(jax.random.key(os.getpid()), (count,), jnp.uint32))()
  found = {}
  for name, fn in (("copy", jnp.copy), ("fused", lambda x: x ^ jnp.uint32(1))):
    call = jax.jit(fn)
    found[name] = timing.seconds(lambda call=call: call(data), settings)
  rates = {name: 2 * settings.copy_bytes / t["seconds"] for name, t in found.items()}
  return {"bytes_per_s": max(rates.values()), "rates": rates, "bytes": settings.copy_bytes,
          "times": found}  # fmt: skip


def matmul(settings):
  """FLOP/s of a square bfloat16 product of random data, float32 sums, bfloat16 result."""
  width = settings.matmul
  keys = jax.random.split(jax.random.key(os.getpid()))
  normal = jax.jit(lambda key: jax.random.normal(key, (width, width), jnp.bfloat16))
  a, b = map(normal, keys)
  call = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.bfloat16))
  times = timing.seconds(lambda: call(a, b), settings)
  return {"flops": 2 * float(np.float64(width) ** 3) / times["seconds"], "width": width, **times}
