"""Chunks of a prompt after a prefix: TFLOP/s of causal attention."""

import functools

from experiments.gpu_check import attention_timing, batches, floors
from experiments.gpu_check.decode import measured_ceilings


def cases(settings, records):
  ceilings = measured_ceilings(records)
  for tokens, prefix in settings.chunks:
    yield name(tokens, prefix), functools.partial(check, tokens, prefix, settings, ceilings)


def name(tokens, prefix):
  return f"chunk {tokens} prefix {prefix}"


def check(tokens, prefix, settings, ceilings):
  shape = settings.shape
  longest = max(sum(chunk) for chunk in settings.chunks)
  found = attention_timing.time_rows(
    [batches.Row(tokens, prefix, False)], settings, num_tokens=tokens, longest=longest, num_rows=1
  )
  limits = floors.chunk(shape, tokens, prefix, ceilings)
  flops = floors.chunk_flops(shape, tokens, prefix)
  return {
    **found, "tokens": tokens, "prefix": prefix, "flops": flops,
    "tflop_per_s": flops / found["seconds"] / 1e12,
    "bytes_floor_s": limits.bytes, "flops_floor_s": limits.flops, "predicted_s": limits.predicted,
    "of_matmul": limits.flops / found["seconds"],
  }  # fmt: skip
