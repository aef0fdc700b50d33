"""Decodes as the engine plans them: GB/s of keys and values."""

import functools

from experiments.gpu_check import attention_timing, batches, floors


def cases(settings, records):
  ceilings = measured_ceilings(records)
  for batch, context in settings.decodes:
    yield name(batch, context), functools.partial(check, batch, context, settings, ceilings)


def name(batch, context):
  return f"batch {batch} context {context}"


def measured_ceilings(records):
  """Those of this run; the ones measured elsewhere if they are not known."""
  found = records.values("machine")
  if not {"copy", "matmul", "facts"} <= found.keys():
    return floors.H200
  return floors.Ceilings(
    name="measured in this run", copy=found["copy"]["bytes_per_s"],
    flops=found["matmul"]["flops"], sms=found["facts"]["facts"]["sms_planned_for"],
  )  # fmt: skip


def check(batch, context, settings, ceilings):
  shape = settings.shape
  rows = [batches.Row(1, context - 1, True)] * batch
  found = attention_timing.time_rows(
    rows, settings, num_tokens=batch, longest=max(c for _, c in settings.decodes), num_rows=batch
  )
  limits = floors.decode(shape, batch, context, ceilings, found["items"])
  kv_bytes = batch * context * shape.kv_bytes
  return {
    **found, "batch": batch, "context": context, "kv_bytes": kv_bytes,
    "gb_per_s": kv_bytes / found["seconds"] / 1e9,
    "bytes_floor_s": limits.bytes, "flops_floor_s": limits.flops, "predicted_s": limits.predicted,
    "of_copy": limits.bytes / found["seconds"],
  }  # fmt: skip
