"""The share of what the machine can do that our engine reaches, in the same round."""

import functools

import jax.numpy as jnp

from experiments.engine_speed import limits
from experiments.peers import figures

_products = functools.lru_cache(maxsize=4)(limits.plain_products)
_bandwidth = functools.cache(limits.read_bandwidth)


def achieved(case, found, model, loaded, context):
  """Prefill against plain products of the same shapes; decode against reading memory.

  Args:
    case: that was timed.
    found: its figures on our engine.
    model: the ModelConfig.
    loaded: what our worker said when it had loaded.
    context: mean tokens of a decoder.
  """
  if case.kind == "prefill":
    best = limits.product_flops_per_s(*_products(model, case.prompt, jnp.bfloat16))
    ours = limits.prefill_flops(model, case.prompt) * found["tokens_per_s"] / case.prompt
    return {"gflops": ours / 1e9, "product_gflops": best / 1e9, "of_limit": ours / best}
  if case.kind == "decode":
    kv_bytes = loaded["kv_bytes_per_token"]
    step = figures.decode_bytes(model, case.rows, context, kv_bytes)
    ours, best = step * found["tokens_per_s"] / case.rows, _bandwidth()()
    return {"gb_s": ours / 1e9, "read_gb_s": best / 1e9, "of_limit": ours / best}
  return {}
