"""torch's scaled_dot_product_attention on dense keys and values of the same sizes."""

import functools
import statistics

from experiments.gpu_check import floors
from experiments.gpu_check.decode import measured_ceilings
from experiments.gpu_check.stages import Absent

_BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
DEVICE = "cuda"
_CALLS = 16
_MOST_BYTES = 1 << 30  # of K and V that calls take turns over, where one set is smaller


def cases(settings, records):
  yield "ceilings", functools.partial(check_ceilings, settings)
  for batch, context in settings.decodes:
    yield (
      f"decode batch {batch} context {context}",
      functools.partial(check_decode, batch, context, settings),
    )
  ceilings = measured_ceilings(records)
  for tokens, prefix in settings.chunks:
    yield (
      f"chunk {tokens} prefix {prefix}",
      functools.partial(check_chunk, tokens, prefix, settings, ceilings),
    )


def library():
  try:
    import torch
  except ImportError as error:
    raise Absent("torch is not installed") from error
  if not torch.cuda.is_available():
    raise Absent("torch sees no GPU")
  return torch


def check_ceilings(settings):
  torch = library()
  data = torch.randint(1 << 30, (settings.copy_bytes // 4,), dtype=torch.int32, device=DEVICE)
  target = torch.empty_like(data)
  copy = seconds(torch, lambda: target.copy_(data), settings)
  width = settings.matmul
  a, b = (torch.randn(width, width, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
  product = seconds(torch, lambda: a @ b, settings)
  return {
    "bytes_per_s": 2 * settings.copy_bytes / copy["seconds"], "copy": copy,
    "flops": 2 * float(width) ** 3 / product["seconds"], "matmul": product,
    "torch": torch.__version__,
  }  # fmt: skip


def check_decode(batch, context, settings):
  torch, shape = library(), settings.shape
  found = _attend(torch, batch, 1, context, settings, None)
  kv_bytes = batch * context * shape.kv_bytes
  return found | {"batch": batch, "context": context, "gb_per_s": kv_bytes / found["seconds"] / 1e9}


def check_chunk(tokens, prefix, settings, ceilings):
  del ceilings
  torch = library()
  from torch.nn.attention.bias import causal_lower_right

  mask = causal_lower_right(tokens, prefix + tokens) if prefix else "causal"
  found = _attend(torch, 1, tokens, prefix + tokens, settings, mask)
  flops = floors.chunk_flops(settings.shape, tokens, prefix)
  return found | {
    "tokens": tokens,
    "prefix": prefix,
    "tflop_per_s": flops / found["seconds"] / 1e12,
  }


def _attend(torch, batch, tokens, keys, settings, mask):
  """The fastest backend that takes this: {"seconds", ..., "backend", "backends"}."""
  shape = settings.shape
  size = batch * keys * shape.kv_bytes
  layers = max(1, min(_MOST_BYTES // size, _CALLS))
  normal = lambda *dims: torch.randn(*dims, dtype=torch.bfloat16, device=DEVICE)
  q = normal(batch, shape.num_heads, tokens, shape.head_dim)
  pairs = [
    tuple(normal(batch, shape.num_kv_heads, keys, shape.head_dim) for _ in range(2))
    for _ in range(layers)
  ]
  found = {}
  for name in _BACKENDS:
    try:
      found[name] = _time_backend(torch, name, q, pairs, mask, settings)
    except Exception as error:  # a backend that does not take this case
      found[name] = {"error": f"{type(error).__name__}: {str(error)[:120]}"}
  times = {name: values["seconds"] for name, values in found.items() if "seconds" in values}
  if not times:
    raise Absent(f"no backend takes it: {found}")
  best = min(times, key=times.get)
  return {**found[best], "backend": best, "backends": found, "layers": layers}


def _time_backend(torch, name, q, pairs, mask, settings):
  from torch.nn.attention import SDPBackend, sdpa_kernel

  options = {"is_causal": True} if mask == "causal" else {"attn_mask": mask}
  attention = torch.nn.functional.scaled_dot_product_attention

  def calls(pairs, grouped):
    for i in range(_CALLS):
      k, v = pairs[i % len(pairs)]
      out = attention(q, k, v, enable_gqa=grouped, **options)
    return out

  with sdpa_kernel([getattr(SDPBackend, name)]):
    try:
      calls(pairs, True)
      grouped = True
    except Exception:  # this backend knows no groups: a KV head for every query head, copied before
      group, grouped = settings.shape.group, False
      pairs = [tuple(x.repeat_interleave(group, 1) for x in pair) for pair in pairs]
    call = functools.partial(calls, pairs, grouped)
    times = seconds(torch, graphed(torch, call), settings)
  return {k: v / _CALLS if k in ("seconds", "low", "high") else v for k, v in times.items()} | {
    "grouped": grouped
  }


def graphed(torch, call):
  """`call` as a replayed graph, which leaves out the gaps between launches."""
  try:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
      call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
      call()
    return graph.replay
  except Exception:  # what cannot be captured is timed as it is
    return call


def seconds(torch, call, settings):
  """As `timing.seconds`, by events of the device."""
  for _ in range(2):
    call()
  once = _timed(torch, call, 2)
  count = max(1, min(round(settings.repeat_seconds / once), 1000))
  times = [_timed(torch, call, count) for _ in range(settings.repeats)]
  return {
    "seconds": statistics.median(times), "low": min(times), "high": max(times), "calls": count,
  }  # fmt: skip


def _timed(torch, call, count):
  begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
  torch.cuda.synchronize()
  begin.record()
  for _ in range(count):
    call()
  end.record()
  torch.cuda.synchronize()
  return begin.elapsed_time(end) / 1e3 / count
