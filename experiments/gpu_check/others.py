"""FlashInfer and flash-attn, where they can be imported: a few of the cases, paged."""

import functools

from experiments.gpu_check import floors, torch_sdpa
from experiments.gpu_check.stages import Absent

_CASES = 6  # of decodes, and of chunks: the most important ones
_FLASH_PAGE = 256  # the least that flash-attn 2 takes


def cases(settings, records):
  del records
  for batch, context in settings.decodes[:_CASES]:
    for library, call in (("flashinfer", flashinfer_decode), ("flash_attn", flash_attn)):
      yield (
        f"{library} decode batch {batch} context {context}",
        functools.partial(decode, call, batch, context, settings),
      )
  for tokens, prefix in settings.chunks[:_CASES]:
    yield (
      f"flash_attn chunk {tokens} prefix {prefix}",
      functools.partial(chunk, tokens, prefix, settings),
    )


def decode(library, batch, context, settings):
  torch = torch_sdpa.library()
  times = library(torch, batch, 1, context, settings)
  kv_bytes = batch * context * settings.shape.kv_bytes
  return times | {"batch": batch, "context": context, "gb_per_s": kv_bytes / times["seconds"] / 1e9}


def chunk(tokens, prefix, settings):
  torch = torch_sdpa.library()
  times = flash_attn(torch, 1, tokens, prefix + tokens, settings)
  flops = floors.chunk_flops(settings.shape, tokens, prefix)
  return times | {
    "tokens": tokens,
    "prefix": prefix,
    "tflop_per_s": flops / times["seconds"] / 1e12,
  }


def flash_attn(torch, batch, tokens, keys, settings):
  try:
    from flash_attn import flash_attn_with_kvcache
  except ImportError as error:
    raise Absent("flash-attn is not installed") from error
  shape, columns = settings.shape, -(-keys // _FLASH_PAGE)
  normal = lambda *dims: torch.randn(*dims, dtype=torch.bfloat16, device="cuda")
  pool = (batch * columns, _FLASH_PAGE, shape.num_kv_heads, shape.head_dim)
  k, v = normal(*pool), normal(*pool)
  q = normal(batch, tokens, shape.num_heads, shape.head_dim)
  table = torch.randperm(batch * columns, dtype=torch.int32, device="cuda").view(batch, columns)
  lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
  call = lambda: flash_attn_with_kvcache(
    q, k, v, cache_seqlens=lengths, block_table=table, causal=True
  )
  return torch_sdpa.seconds(torch, torch_sdpa.graphed(torch, call), settings)


def flashinfer_decode(torch, batch, tokens, context, settings):
  del tokens
  try:
    import flashinfer
  except ImportError as error:
    raise Absent("FlashInfer is not installed") from error
  shape, size = settings.shape, settings.shape.page_size
  columns = context // size
  pages = batch * columns
  cuda = {"device": "cuda", "dtype": torch.int32}
  workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
  wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
  wrapper.plan(
    torch.arange(batch + 1, **cuda) * columns, torch.randperm(pages, **cuda),
    torch.full((batch,), size, **cuda), shape.num_heads, shape.num_kv_heads, shape.head_dim, size,
    q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
  )  # fmt: skip
  normal = lambda *dims: torch.randn(*dims, dtype=torch.bfloat16, device="cuda")
  pool = normal(pages, 2, size, shape.num_kv_heads, shape.head_dim)
  q = normal(batch, shape.num_heads, shape.head_dim)
  return torch_sdpa.seconds(torch, lambda: wrapper.run(q, pool), settings)
