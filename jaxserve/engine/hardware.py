"""What the device in use achieves: from the table if it is known, else measured on the spot."""

import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve import cost_tables
from jaxserve.cost import Hardware
from jaxserve.engine import clock

# What the engine reaches of plain products and plain reads, from the recorded results of
# `experiments/engine_speed`: prefill 65-80%; decode steps a third of the bandwidth, KV included.
PRODUCT_SHARE = 0.7
READ_SHARE = 1 / 3
_SECONDS = 0.05  # for each of the two measurements, without compiling
_CPU_WIDTH, _ACCELERATOR_WIDTH = 1024, 4096
_READ_BYTES = 1 << 28


def find(device: jax.Device, dtype: str) -> Hardware:
  """The figures of a device: the table's for a GPU that it has in bfloat16, else `measure`.

  Args:
    device: that the model runs on.
    dtype: "bfloat16" or "float32", of weights and products. The table is of bfloat16.

  Returns:
    the figures.
  """
  known = cost_tables.device_of_kind(device.device_kind)
  if known is not None and dtype == "bfloat16":
    return known.hardware
  return measure(device, dtype)


def measure(device: jax.Device, dtype: str) -> Hardware:
  """Times one square product and one read of a large array; takes a few hundred milliseconds.

  What the engine achieves is taken as the shares of these that it was recorded to reach on XLA:CPU.

  Args:
    device: to be measured; it should be idle.
    dtype: of the product's operands; sums are in float32.

  Returns:
    the figures. In the place of those of a data sheet are the plain product and the plain read.
  """
  width = _CPU_WIDTH if device.platform == "cpu" else _ACCELERATOR_WIDTH
  operand = jax.device_put(jnp.full((width, width), 0.5, dtype), device)
  data = jax.device_put(jnp.ones(_READ_BYTES // 4, jnp.float32), device)
  dims = (((1,), (1,)), ((), ()))
  product = jax.jit(lambda x: lax.dot_general(x, x, dims, preferred_element_type=jnp.float32))
  flops = 2 * width**3 / _seconds(product, operand)
  bandwidth = _READ_BYTES / _seconds(jax.jit(jnp.sum), data)
  return Hardware(
    name=f"this {device.device_kind}",
    flops=PRODUCT_SHARE * flops,
    bandwidth=READ_SHARE * bandwidth,
    spec_flops=flops,
    spec_bandwidth=bandwidth,
  )


def _seconds(call: Callable[[jax.Array], jax.Array], argument: jax.Array) -> float:
  """Median of calls after the first, which compiles."""
  jax.block_until_ready(call(argument))
  times: list[float] = []
  while len(times) < 3 or sum(times) < _SECONDS:
    begin = clock.now()
    jax.block_until_ready(call(argument))
    times.append(clock.now() - begin)
  return statistics.median(times)
