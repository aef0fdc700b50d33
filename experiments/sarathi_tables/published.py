"""Figures published by others, and the step times they were measured with.

Sarathi-Serve (OSDI 2024): Table 4 and Figures 10 and 11 of the paper, iteration times of its
artifact. Prefill-first against mixed: aisimulate pull request 120 (Qwen3-32B-FP8 on H200), where
SGLang's own scheduler stands for prefill-first.
"""

import functools

import jax.numpy as jnp

TABLE_4 = {
  ("chat", "hybrid only"): {"p50_ttft_s": 0.53, "p99_tbt_s": 0.68},
  ("chat", "chunking only"): {"p50_ttft_s": 1.04, "p99_tbt_s": 0.17},
  ("chat", "both"): {"p50_ttft_s": 0.76, "p99_tbt_s": 0.14},
  ("arxiv", "hybrid only"): {"p50_ttft_s": 3.78, "p99_tbt_s": 1.38},
  ("arxiv", "chunking only"): {"p50_ttft_s": 5.38, "p99_tbt_s": 0.20},
  ("arxiv", "both"): {"p50_ttft_s": 3.90, "p99_tbt_s": 0.17},
}
"""Yi-34B on two A100, budget 1024, 128 requests. TBT is the gap between tokens."""

CAPACITY_GAIN = {
  ("mistral", "chat", "strict"): 2.78,
  ("mistral", "chat", "relaxed"): 2.15,
  ("mistral", "arxiv", "strict"): 1.82,
  ("mistral", "arxiv", "relaxed"): 1.97,
  ("yi", "chat", "strict"): 4.00,
  ("yi", "chat", "relaxed"): 2.44,
  ("yi", "arxiv", "strict"): 1.69,
  ("yi", "arxiv", "relaxed"): 1.94,
}
"""Capacity of Sarathi-Serve over that of Orca, as read from the figures by others."""

MIXED = {
  (1, "mixed"): {"ttft_ms": 961, "tpot_ms": 33.6, "p99_itl_ms": 552, "output_throughput": 3704},
  (1, "prefill first"): {
    "ttft_ms": 4472, "tpot_ms": 30.2, "p99_itl_ms": 30, "output_throughput": 3708,
  },
  (2, "mixed"): {"ttft_ms": 511, "tpot_ms": 19.1, "p99_itl_ms": 294},
  (2, "prefill first"): {"ttft_ms": 2371, "tpot_ms": 17.3, "p99_itl_ms": 17},
}  # fmt: skip
"""By the number of GPUs: mean TTFT and TPOT. Prefill-first is SGLang's own scheduler, mixed a model
of it that decodes in every step."""

PREFILL_MS = {128: 48.1, 512: 105.6, 1024: 214.3, 2048: 366.0, 4096: 757.6, 8192: 1863.3,
              16384: 4407.5}  # fmt: skip
DECODE_MS = {1: 46.8, 2: 47.5, 4: 48.8, 8: 69.7, 16: 77.3, 32: 87.9, 64: 127.8, 128: 189.3}
"""Iterations of Yi-34B on two A100 PCIe: a whole prompt by its tokens, decodes by their rows."""

BASE_MS, TOKEN_MS, PAIR_MS, LEAST_MS, ROW_MS = 27.7, 0.1568, 1.39e-5, 48.0, 1.21
"""A fit to them: max(BASE + TOKEN tokens, LEAST) + PAIR sum of c (prefix + c/2) + ROW decodes."""


@functools.cache
def yi_34b():
  """Step time of Yi-34B on two A100 PCIe, as the artifact measured it."""

  def step_time(load):
    tokens = load.num_tokens.astype(jnp.float32)
    base = jnp.maximum(BASE_MS + TOKEN_MS * tokens, LEAST_MS)
    rows = ROW_MS * load.num_decodes.astype(jnp.float32)
    return 1e-3 * (base + PAIR_MS * load.attended + rows)

  return step_time
