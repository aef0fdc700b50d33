"""The reference case: Llama-3-8B on an H100, 32 decodes at 2,048 tokens, a 32,768-token prompt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import config, cost

MODEL, H100 = cost.LLAMA3_8B, cost.H100
PROMPT, BUDGET, ROWS, CONTEXT = 32768, 2048, 32, 2048
RESIDENT = ROWS * CONTEXT
PAGE = 64


def chunk_ms(chunk, prefix, **decodes):
  return 1e3 * cost.chunk_seconds(MODEL, H100, chunk, prefix, **decodes)


def itl_budget(page_size, itl=0.060):
  return cost.budget_from_itl(MODEL, H100, itl, 0.0095, page_size)


def worst_budget(itl=0.060, page_size=PAGE, **changes):
  case = {"rows": ROWS, "resident": RESIDENT} | changes
  return cost.worst_chunk_budget(MODEL, H100, itl, PROMPT, page_size=page_size, **case)


def worst_ms(budget):
  return chunk_ms(budget - ROWS, PROMPT, rows=ROWS, resident=RESIDENT)


UNCHUNKED = cost.prefill_seconds(MODEL, H100, PROMPT)
DECODE = cost.decode_seconds(MODEL, H100, ROWS, CONTEXT)
RIDING = cost.riding_seconds(MODEL, H100, ROWS, CONTEXT)
KV_READ = cost.kv_seconds(MODEL, H100, RESIDENT)

# (what, value, as it is printed, format)
TABLE = [
  ("weights, GB", cost.weight_bytes(MODEL) / 1e9, "16.06", ".2f"),
  ("KV bytes a token", cost.kv_bytes_per_token(MODEL), "131072", "d"),
  ("GEMM TFLOP", cost.gemm_flops(MODEL, PROMPT) / 1e12, "526", ".0f"),
  ("attention TFLOP", cost.attention_flops(MODEL, PROMPT) / 1e12, "281", ".0f"),
  ("prefill TFLOP, cut", int(cost.prefill_flops(MODEL, PROMPT) / 1e12), "807", "d"),
  ("unchunked, s", UNCHUNKED, "1.615", ".3f"),
  ("resident KV, GB", RESIDENT * cost.kv_bytes_per_token(MODEL) / 1e9, "8.59", ".2f"),
  ("decode step, GB", DECODE * H100.bandwidth / 1e9, "24.65", ".2f"),
  ("decode step, ms", 1e3 * DECODE, "9.48", ".2f"),
  ("spike over a decode step", UNCHUNKED / DECODE, "170", ".0f"),
  ("spike over 50 ms", UNCHUNKED / 0.050, "32", ".0f"),
  ("chunks", cost.num_chunks(PROMPT, BUDGET, ROWS), "17", "d"),
  ("last chunk", cost.last_chunk(PROMPT, BUDGET, ROWS), "512", "d"),
  ("decoders' KV, ms", 1e3 * KV_READ, "3.3", ".1f"),
  ("first full chunk, ms", chunk_ms(2016, 0, resident=RESIDENT), "70", ".0f"),
  ("last full chunk, ms", chunk_ms(2016, 30240, resident=RESIDENT), "134", ".0f"),
  ("riding KV over 17 chunks, ms", 17e3 * KV_READ, "56", ".0f"),
  ("riding rows of GEMM, ms", 1e3 * (RIDING - KV_READ), "1.0", ".1f"),
  ("riding decodes, ms", 1e3 * RIDING, "4.3", ".1f"),
  ("riding saves", DECODE / RIDING, "2.2", ".1f"),
  ("prefill slot, us", 1e6 * cost.prefill_slot_seconds(MODEL, H100), "33.2", ".1f"),
  ("decode slot, ms", 1e3 * cost.decode_slot_seconds(MODEL, H100), "1.84", ".2f"),
  ("KV re-read a chunk, GB", cost.kv_reread_bytes(MODEL, PROMPT, 1) / 1e9, "2.15", ".2f"),
  ("weights a chunk, GB", cost.weight_reread_bytes(MODEL, 1) / 1e9, "16.06", ".2f"),
  ("crossover, thousand tokens", cost.crossover_tokens(MODEL) / 1e3, "245", ".0f"),
  ("KV over weights at 131072", 131072 / cost.crossover_tokens(MODEL), "53%", ".0%"),
  ("ridge, data sheet", cost.spec_ridge_point(H100), "295", ".0f"),
  ("ridge, achieved", cost.ridge_point(H100), "192", ".0f"),
  ("intensity of a chunk", cost.arithmetic_intensity(MODEL, 200), "200", ".0f"),
  ("budget for 60 ms", itl_budget(1), "1572", "d"),
  ("the same in pages", itl_budget(PAGE), "1536", "d"),
  ("honest budget for 60 ms", worst_budget(), "832", "d"),
  ("its worst chunk, ms", worst_ms(832), "57.9", ".1f"),
  ("one page more, ms", worst_ms(896), "62.2", ".1f"),
]


@pytest.mark.parametrize(
  ("value", "shown", "spec"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_reference_case(value, shown, spec):
  assert format(value, spec) == shown


def test_chunking_changes_no_flops():
  width = BUDGET - ROWS
  starts = range(0, PROMPT, width)
  chunks = [min(width, PROMPT - start) for start in starts]
  flops = sum(
    cost.gemm_flops(MODEL, c) + cost.attention_flops(MODEL, c, start)
    for c, start in zip(chunks, starts, strict=True)
  )
  assert len(chunks) == 17 and chunks[-1] == 512
  assert flops == pytest.approx(cost.prefill_flops(MODEL, PROMPT), rel=1e-12)


def test_kv_reread_is_the_sum_over_equal_chunks_to_one_chunk():
  chunks, width = 16, PROMPT // 16
  k = cost.kv_bytes_per_token(MODEL)
  exact = sum(k * j * width for j in range(1, chunks + 1))
  assert exact - cost.kv_reread_bytes(MODEL, PROMPT, chunks) == k * PROMPT / 2


def test_the_remainder_is_cheaper_than_a_full_chunk():
  assert chunk_ms(512, 32256) < chunk_ms(2016, 30240)


def test_a_tiny_chunk_is_no_faster_than_reading_the_weights():
  decodes = {"rows": ROWS, "resident": RESIDENT}
  assert chunk_ms(1, 0, **decodes) >= 1e3 * DECODE
  assert chunk_ms(1, 0, **decodes) == pytest.approx(1e3 * DECODE, rel=1e-3)
  assert chunk_ms(200, 0) > chunk_ms(160, 0)


def test_riding_decodes_are_what_a_chunk_grows_by():
  alone, carrying = chunk_ms(2016, 4032), chunk_ms(2016, 4032, rows=ROWS, resident=RESIDENT)
  assert carrying - alone == pytest.approx(1e3 * RIDING)


@pytest.mark.parametrize("page_size", [1, 16, PAGE])
@pytest.mark.parametrize("itl", [0.012, 0.015, 0.060, 0.3])
def test_worst_chunk_budget_is_the_largest_that_meets_the_target(itl, page_size):
  budget = worst_budget(itl, page_size)
  assert budget % page_size == 0 and budget > ROWS
  assert worst_ms(budget) <= 1e3 * itl < worst_ms(budget + page_size)


def test_a_target_below_the_decodes_gives_no_budget():
  assert worst_budget(itl=0.009) == 0
  assert worst_budget(itl=0.0025) == 0
  assert cost.worst_chunk_budget(MODEL, H100, 0.001, 0) == 0
  assert itl_budget(PAGE, itl=0.009) == 0


def test_cost_of_a_configured_model():
  llama = config.ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336,
    num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
  )  # fmt: skip
  model = cost.ModelCost.of(llama)
  assert format(cost.weight_bytes(model) / 1e9, ".2f") == "16.06"
  assert cost.kv_bytes_per_token(model) == cost.kv_bytes_per_token(MODEL)
  assert cost.kv_bytes_per_token(cost.ModelCost.of(llama, kv_bytes=1)) == 65536


GRID = [(c, p, r) for c in (1, 160, 200, 2016, 16384) for p in (0, 31, 30240) for r in (0, 32)]


def test_the_terms_of_a_step_give_its_seconds():
  terms = cost.step_terms(MODEL, H100)
  for chunk, prefix, rows in GRID:
    resident = rows * CONTEXT
    expected = chunk_ms(chunk, prefix, rows=rows, resident=resident)
    got = cost.step_ms(terms, chunk + rows, chunk * (prefix + chunk / 2), resident)
    assert got == pytest.approx(expected, rel=1e-12)
  assert cost.step_ms(terms, ROWS, 0, RESIDENT) == pytest.approx(1e3 * DECODE)
  assert {k: format(v, ".3g") for k, v in terms.items()} == {
    "token_ms": "0.0321", "weights_ms": "6.18", "pair_ms": "1.05e-06", "kv_ms": "5.04e-05"
  }  # fmt: skip


def test_the_time_of_a_step_is_the_same_float32_however_it_is_compiled():
  rng = np.random.default_rng(0)
  values = rng.uniform(0.01, 3, (4000, 7)).astype(np.float32)
  names = ("token_ms", "weights_ms", "pair_ms", "kv_ms")

  def time(row):
    return cost.step_ms(dict(zip(names, row[:4], strict=True)), *row[4:])

  expected = np.array([time(row) for row in values])
  assert expected.dtype == np.float32
  np.testing.assert_array_equal(jax.jit(jax.vmap(time))(values), expected)
  alone = jax.jit(time)
  np.testing.assert_array_equal([alone(row) for row in values[:200]], expected[:200])


TRACEABLE = {
  "prefill_flops": lambda n: cost.prefill_flops(MODEL, n),
  "prefill_seconds": lambda n: cost.prefill_seconds(MODEL, H100, n),
  "decode_seconds": lambda n: cost.decode_seconds(MODEL, H100, ROWS, n),
  "chunk_seconds": lambda n: cost.chunk_seconds(
    MODEL, H100, n, 3 * n, rows=n // 64, resident=n * 16
  ),
  "num_chunks": lambda n: cost.num_chunks(PROMPT, n, ROWS),
  "last_chunk": lambda n: cost.last_chunk(PROMPT, n, ROWS),
  "riding_seconds": lambda n: cost.riding_seconds(MODEL, H100, n, CONTEXT),
  "prefill_slot_seconds": lambda n: cost.prefill_slot_seconds(MODEL, H100, n),
  "decode_slot_seconds": lambda n: cost.decode_slot_seconds(MODEL, H100, n, n),
  "weight_reread_bytes": lambda n: cost.weight_reread_bytes(MODEL, n),
  "kv_reread_bytes": lambda n: cost.kv_reread_bytes(MODEL, n, n),
  "arithmetic_intensity": lambda n: cost.arithmetic_intensity(MODEL, n),
  "budget_from_itl": lambda n: cost.budget_from_itl(MODEL, H100, n / 30000, 0.0095, PAGE),
  "worst_chunk_budget": lambda n: cost.worst_chunk_budget(
    MODEL, H100, n / 30000, 5 * n, rows=n // 64, resident=n * 16, page_size=PAGE
  ),
}


@pytest.mark.parametrize("name", TRACEABLE)
def test_traced_equals_plain(name):
  function, sizes = TRACEABLE[name], [64, 251, 2048, 4099]
  swept = jax.jit(jax.vmap(function))(jnp.array(sizes, jnp.int32))
  np.testing.assert_allclose(swept, [function(n) for n in sizes], rtol=1e-6)


def test_latency_is_differentiable():
  slope = jax.grad(lambda c: cost.chunk_seconds(MODEL, H100, c, PROMPT))(1024.0)
  step = (chunk_ms(1025, PROMPT) - chunk_ms(1023, PROMPT)) / 2e3
  assert slope == pytest.approx(step, rel=1e-4)


def test_description_names_the_stall_and_the_steps():
  text = cost.describe(BUDGET)
  assert "1.62 s" in text and "17 steps of 71 to 135 ms" in text and "9.5 ms" in text
  assert "leaves nothing" in cost.describe(ROWS)
  assert "1 step of 1620 ms" in cost.describe(PROMPT + ROWS)
  assert "2 steps of" in cost.describe(PROMPT)
