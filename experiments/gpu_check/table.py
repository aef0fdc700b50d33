"""The short table that a run prints last."""

from experiments.gpu_check import decode, prefill, serving


def render(settings, records):
  """All that is known, a line each."""
  parts = [
    *_machine(records), *_checks(records), *_decodes(settings, records),
    *_chunks(settings, records), *_serving(settings, records), *_problems(records),
  ]  # fmt: skip
  return "\n".join(parts)


def failures(records):
  """Lines of cases that failed."""
  return [line for line in records.finished().values() if line["status"] == "failed"]


def _machine(records):
  found = records.values("machine")
  if "facts" not in found:
    return ["machine: not measured"]
  facts = found["facts"]["facts"]
  copied, multiplied = (
    f"{found[name][key] / 1e12:.3g} {unit}" if name in found else "not measured"
    for name, key, unit in (("copy", "bytes_per_s", "TB/s"), ("matmul", "flops", "TFLOP/s"))
  )
  lines = [
    f"{facts['device']}, {facts['sms']} SMs, driver {facts['driver']}, jax {facts['jax']}, commit "
    f"{facts['commit']}, sources {records.source}",
    f"ceilings: copy {copied}, matmul {multiplied}",
  ]
  torch = records.values("torch").get("ceilings")
  if torch:
    lines.append(
      f"  by torch {torch['torch']}: copy {torch['bytes_per_s'] / 1e12:.3g} TB/s, matmul "
      f"{torch['flops'] / 1e12:.3g} TFLOP/s"
    )
  return lines


def _checks(records):
  lines = []
  for stage, words in (("numerics", "kernels against float64"), ("engine", "whole engine")):
    ended = [v for (s, _), v in records.finished().items() if s == stage]
    counts = {state: sum(v["status"] == state for v in ended) for state in _STATES}
    said = ", ".join(f"{n} {state}" for state, n in counts.items() if n) or "not run"
    errors = [
      v[key] for v in ended if v["status"] == "ok" for key in v
      if key.endswith("_error") and isinstance(v[key], float)
    ]  # fmt: skip
    worst = f"; largest error of those that passed {max(errors):.2g}" if errors else ""
    lines.append(f"{words}: {said}{worst}")
  return lines


_STATES = ("ok", "failed", "absent", "no time")


def _cell(value, pattern="{:.1f}"):
  return "-" if value is None else pattern.format(value)


def _grid(names, heads, rows):
  """Lines of a table, without the rows of which only the first `names` cells are known."""
  rows = [row for row in rows if any(cell != "-" for cell in row[names:])]
  if not rows:
    return []
  widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
  return [
    "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    for row in [heads, *rows]
  ]


def _decodes(settings, records):
  mine, torch, cudnn = (records.values(stage) for stage in ("decode", "torch", "cudnn"))
  other, rows = records.values("others"), []
  for batch, context in sorted(settings.decodes):
    name = decode.name(batch, context)
    found = mine.get(name, {})
    theirs = [
      torch.get(f"decode {name}", {}), cudnn.get(f"decode {name}", {}),
      *(other.get(f"{lib} decode {name}", {}) for lib in ("flashinfer", "flash_attn")),
    ]  # fmt: skip
    micro = lambda key, found=found: _cell(1e6 * found[key] if key in found else None)
    rows.append([
      str(batch), str(context), micro("seconds"), micro("bytes_floor_s"), micro("predicted_s"),
      _cell(found.get("gb_per_s"), "{:.0f}"), _cell(found.get("of_copy"), "{:.0%}"),
      *(_cell(x.get("gb_per_s"), "{:.0f}") for x in theirs),
    ])  # fmt: skip
  heads = ["batch", "context", "us", "floor", "predicted", "GB/s", "of copy", "SDPA", "cuDNN",
           "FlashInfer", "flash-attn"]  # fmt: skip
  return [f"decode ({_what(mine)}), KV GB/s", *_grid(2, heads, rows)]


def _what(found):
  names = sorted({value["implementation"] for value in found.values()})
  return ", ".join(names) or "not measured"


def _chunks(settings, records):
  mine, torch, other = (records.values(stage) for stage in ("prefill", "torch", "others"))
  rows = []
  for tokens, prefix in sorted(settings.chunks):
    name = prefill.name(tokens, prefix)
    found = mine.get(name, {})
    micro = lambda key, found=found: _cell(1e6 * found[key] if key in found else None)
    theirs = torch.get(name, {}), other.get(f"flash_attn {name}", {})
    rows.append([
      str(tokens), str(prefix), micro("seconds"), micro("flops_floor_s"), micro("predicted_s"),
      _cell(found.get("tflop_per_s")), _cell(found.get("of_matmul"), "{:.0%}"),
      *(_cell(x.get("tflop_per_s")) for x in theirs),
    ])  # fmt: skip
  heads = ["chunk", "prefix", "us", "floor", "predicted", "TFLOP/s", "of matmul", "SDPA",
           "flash-attn"]  # fmt: skip
  return [f"chunk ({_what(mine)}), TFLOP/s of causal attention", *_grid(2, heads, rows)]


def _serving(settings, records):
  found, rows = records.values("serving"), []
  for budget in sorted((b for group in settings.budgets for b in group), key=lambda b: b or 1e9):
    value = found.get(serving.name(budget), {})
    rows.append([
      str(budget or "off"), *(
        _cell(value.get(key)) for key in (
          "decode_ms", "decode_predicted_ms", "longest_ms", "longest_predicted_ms", "total_ms",
          "predicted_total_ms",
        )
      ), _cell(value.get("measured_over_predicted"), "{:.2f}"),
    ])  # fmt: skip
  heads = ["budget", "decode ms", "predicted", "longest step", "predicted", "prompt ms",
           "predicted", "ratio"]  # fmt: skip
  title = (
    f"{settings.decoders} decoders at {settings.context}, a prompt of {settings.prompt}: steps "
    "measured, and predicted from the ceilings"
  )
  return [title, *_grid(1, heads, rows)]


def _problems(records):
  lines = []
  for line in records.finished().values():
    if line["status"] in ("failed", "absent"):
      lines.append(f"{line['status']}: {line['stage']}: {line['case']}: {line['error'][:160]}")
  skipped = [line for line in records.finished().values() if line["status"] == "no time"]
  if skipped:
    lines.append(f"no time for {len(skipped)} cases; run again with --resume")
  absent = [x for x in lines if x.startswith("absent")]
  shown = absent[:2] + ([f"absent: {len(absent) - 2} more"] if len(absent) > 2 else [])
  return shown + [x for x in lines if not x.startswith("absent")]
