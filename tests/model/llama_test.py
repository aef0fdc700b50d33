import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import CacheConfig, ModelConfig, PlanShape, RopeConfig
from jaxserve.engine.sampling_row import empty_sampling_table
from jaxserve.model import dots, kv_cache, llama, step
from jaxserve.types import pack_plan
from tests.testing.plans import Row, make_plan

CONFIG = ModelConfig(
  vocab_size=37, hidden_size=20, intermediate_size=13, num_layers=3, num_heads=6, num_kv_heads=2,
  head_dim=10,
)  # fmt: skip
CACHE = CacheConfig(num_pages=23, page_size=5)
MAX_LEN, REQUESTS, ROWS = 29, 5, 3


def _shape(num_tokens=19, query_tile=7):
  return PlanShape(
    num_tokens=num_tokens, num_rows=ROWS, max_requests=REQUESTS, pages_per_request=6, cache=CACHE,
    max_model_len=MAX_LEN, query_tile=min(query_tile, num_tokens),
  )  # fmt: skip


@functools.cache
def _compiled(graphdef, config, shape, dtype, attention, unroll):
  call = functools.partial(
    step.forward, graphdef=graphdef, config=config, shape=shape, dtype=dtype,
    attention=attention, unroll=unroll,
  )  # fmt: skip
  return jax.jit(call, donate_argnums=1)


class Runner:
  """Runs plans one after another over one cache."""

  def __init__(self, config=CONFIG, dtype=jnp.float32, attention="xla", unroll=False):
    self.config, self.dtype = config, dtype
    self.options = attention, unroll
    self.params = llama.random_params(config, seed=3)
    self.graphdef, self.leaves = llama.load(config, self.params, dtype)
    self.kv = kv_cache.init_kv(config, CACHE, dtype, "cpu")
    rng = np.random.default_rng(5)
    self.table = rng.integers(0, config.vocab_size, (REQUESTS, MAX_LEN)).astype(np.int32)

  def forward(self, rows, num_tokens=19):
    shape = _shape(num_tokens)
    plan = make_plan(rows, shape)
    call = _compiled(self.graphdef, self.config, shape, self.dtype, *self.options)
    hidden, self.kv, fields, _ = call(self.leaves, self.kv, self.table, pack_plan(plan))
    return np.asarray(hidden), fields


def _reference(params, config, tokens):
  """Hidden states of a whole sequence by plain numpy in float64."""
  p = {name: value.astype(np.float64) for name, value in params.items()}
  dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads

  def norm(x, gain):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * gain

  def rope(x):
    phases = np.arange(len(x))[:, None] * llama.rope_frequencies(config.rope, dim)
    turn = np.exp(1j * phases)[:, None]
    z = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
    return np.concatenate([z.real, z.imag], -1)

  x = p["embed"][tokens]
  for i in range(config.num_layers):
    w = lambda name, i=i: p[f"layers.{i}.{name}"]
    qkv = (norm(x, w("input_norm")) @ w("qkv").T).reshape(len(x), -1, dim)
    q, k = rope(qkv[:, :heads]), rope(qkv[:, heads : heads + kv_heads])
    v = qkv[:, heads + kv_heads :]
    k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    x = x + np.einsum("hqk,khd->qhd", probs, v).reshape(len(x), -1) @ w("o").T
    gate, up = np.split(norm(x, w("post_norm")) @ w("gate_up").T, 2, axis=1)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ w("down").T
  return norm(x, p["norm"])


def _one_row(request, start, stop, pages):
  return Row(stop - start, start, pages, request)


PAGES = (7, 3, 11, 0, 19, 4)
OTHER = (1, 2, 5, 6, 8, 9)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("attention", ["xla", "ref"])
def test_whole_forward_matches_float64(attention, unroll):
  run = Runner(attention=attention, unroll=unroll)
  hidden, _ = run.forward([_one_row(2, 0, 17, PAGES)])
  expected = _reference(run.params, CONFIG, run.table[2, :17])
  np.testing.assert_allclose(hidden[0], expected[-1], atol=2e-5)


def test_many_rows_take_the_other_product_form_and_still_match():
  run = Runner()
  rows = [_one_row(r, 0, 27, pages) for r, pages in enumerate((PAGES, OTHER, range(12, 18)))]
  hidden, _ = run.forward(rows, 83)
  assert 83 >= dots.MANY_ROWS
  for r in range(3):
    expected = _reference(run.params, CONFIG, run.table[r, :27])
    np.testing.assert_allclose(hidden[r], expected[-1], atol=2e-5)


@pytest.mark.parametrize("chunks", [(17,), (1, 16), (5, 5, 6, 1), (7, 1, 1, 8)])
def test_chunked_equals_whole(chunks):
  run = Runner()
  expected = _reference(run.params, CONFIG, run.table[2, :17])
  at = 0
  for size in chunks:
    hidden, _ = run.forward([_one_row(2, at, at + size, PAGES)])
    at += size
    np.testing.assert_allclose(hidden[0], expected[at - 1], atol=2e-5)


def test_bfloat16_is_near_float32():
  exact, rounded = Runner(), Runner(dtype=jnp.bfloat16)
  rows = [_one_row(2, 0, 9, PAGES), _one_row(0, 0, 1, OTHER)]
  a, b = exact.forward(rows)[0], rounded.forward(rows)[0]
  np.testing.assert_allclose(a[:2], b[:2], atol=0.1)
  assert rounded.kv.k.dtype == jnp.uint16


def test_decodes_beside_a_chunk_match_rows_alone():
  run = Runner()
  run.forward([_one_row(0, 0, 8, PAGES), _one_row(1, 0, 3, OTHER)])
  rows = [_one_row(0, 8, 9, PAGES), _one_row(1, 3, 12, OTHER), _one_row(4, 0, 2, (17,))]
  hidden, _ = run.forward(rows)
  for r, (request, length) in enumerate([(0, 9), (1, 12), (4, 2)]):
    expected = _reference(run.params, CONFIG, run.table[request, :length])
    np.testing.assert_allclose(hidden[r], expected[-1], atol=2e-5)


def test_one_token_bucket_runs_one_row():
  run = Runner()
  for at in range(6):
    hidden, _ = run.forward([_one_row(3, at, at + 1, PAGES)], 1)
  expected = _reference(run.params, CONFIG, run.table[3, :6])
  np.testing.assert_allclose(hidden[0], expected[-1], atol=2e-5)


def test_padding_rows_tokens_and_unwritten_slots_have_no_effect():
  rows = [_one_row(2, 0, 6, PAGES)]
  plain, poisoned = Runner(), Runner()
  expected, _ = plain.forward(rows, 17)
  poisoned.kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), poisoned.kv)
  hidden, _ = poisoned.forward(rows)
  np.testing.assert_allclose(hidden[0], expected[0], atol=1e-6)
  # Only the row's six slots were written.
  written = ~np.isnan(np.asarray(poisoned.kv.k)).any((3, 4)).reshape(3, -1)
  slots = sorted([7 * 5 + i for i in range(5)] + [3 * 5])
  for layer in written:
    assert np.flatnonzero(layer).tolist() == slots


def test_forward_updates_the_cache_in_place_at_any_pool_size():
  temps = set()
  for num_pages in (23, 2300):
    cache = CacheConfig(num_pages=num_pages, page_size=5)
    shape = dataclasses.replace(_shape(11), cache=cache)
    run = Runner(dtype=jnp.bfloat16)
    kv = kv_cache.init_kv(CONFIG, cache, jnp.bfloat16, "cpu")
    plan = pack_plan(make_plan([_one_row(2, 0, 6, PAGES)], shape))
    call = functools.partial(
      step.forward, graphdef=run.graphdef, config=CONFIG, shape=shape, dtype=jnp.bfloat16
    )
    lowered = jax.jit(call, donate_argnums=1).lower(run.leaves, kv, run.table, plan)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= kv.k.nbytes + kv.v.nbytes
    temps.add(memory.temp_size_in_bytes)
  assert len(temps) == 1, temps


def _sampling_table():
  return empty_sampling_table(REQUESTS, CONFIG.vocab_size)


def test_sample_updates_the_token_table_in_place():
  run = Runner()
  call = functools.partial(step.sample, graphdef=run.graphdef, rows=2)
  hidden, fields = np.zeros((ROWS, CONFIG.hidden_size), np.float32), np.zeros((3, ROWS), np.int32)
  lowered = jax.jit(call, donate_argnums=2).lower(
    run.leaves, hidden, run.table, _sampling_table(), fields
  )
  assert lowered.compile().memory_analysis().alias_size_in_bytes >= run.table.nbytes


@pytest.mark.parametrize("tied", [True, False])
def test_sample_writes_greedy_tokens_of_sampling_rows_only(tied):
  run = Runner(dataclasses.replace(CONFIG, tie_word_embeddings=tied))
  rows = [
    Row(6, 0, PAGES, request=2),
    Row(4, 0, OTHER, request=0, sample=False),
    Row(3, 0, (17,), request=4),
  ]
  hidden, fields = run.forward(rows)
  table = _sampling_table()
  call = functools.partial(step.sample, graphdef=run.graphdef, rows=2)
  after, output = jax.jit(call)(run.leaves, hidden, run.table, table, fields)
  logits = hidden[:2] @ run.params["embed" if tied else "lm_head"].T
  best = logits.argmax(1)
  np.testing.assert_array_equal(output.tokens, best)
  expected = run.table.copy()
  expected[2, 6] = best[0]
  np.testing.assert_array_equal(after, expected)
  logprobs = logits.max(1) - np.log(np.exp(logits).sum(1))
  np.testing.assert_allclose(output.logprobs, logprobs, rtol=1e-5)
  np.testing.assert_array_equal(output.top_ids[:, :8], np.argsort(-logits, axis=1)[:, :8])


def test_params_round_trip_through_load():
  params = llama.random_params(CONFIG, seed=1)
  shapes = llama.param_shapes(CONFIG)
  assert {name: value.shape for name, value in params.items()} == shapes
  assert sum(math.prod(shape) for shape in shapes.values()) == CONFIG.num_params
  model = llama.merge(*llama.load(CONFIG, params, jnp.float32))
  np.testing.assert_array_equal(model.layers[2].qkv[...], params["layers.2.qkv"])
  np.testing.assert_array_equal(model.head, params["lm_head"])


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda p: p.pop("layers.1.o"), "'layers.1.o' is missing"),
    (lambda p: p.update(norm=p["norm"][1:]), r"'norm' has shape \(19,\), expected \(20,\)"),
    (lambda p: p.update(embed=p["embed"].astype(np.int8)), "'embed' has dtype int8"),
    (lambda p: p.update(bias=p["norm"]), "'bias' is no parameter"),
  ],
)
def test_load_names_the_tensor_that_is_wrong(change, message):
  params = llama.random_params(CONFIG, seed=1)
  change(params)
  with pytest.raises(ValueError, match=message):
    llama.load(CONFIG, params, jnp.float32)


def test_llama3_rope_follows_the_published_formula():
  rope = RopeConfig(
    theta=500_000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position=8192,
  )  # fmt: skip
  got = llama.rope_frequencies(rope, 128)
  assert got.dtype == np.float32
  for i in range(64):
    frequency = 1 / 500_000.0 ** (2 * i / 128)
    wavelength = 2 * math.pi / frequency
    if wavelength > 8192 / 1.0:
      expected = frequency / 8
    elif wavelength < 8192 / 4.0:
      expected = frequency
    else:
      smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
      expected = (1 - smooth) * frequency / 8 + smooth * frequency
    assert got[i] == pytest.approx(expected, rel=1e-6)


def test_rope_of_one_pair_is_a_rotation():
  table = llama.rope_table(jnp.asarray([0, 3]), RopeConfig(theta=100.0), 4)
  x = jnp.asarray([[[1.0, 0.0, 0.0, 2.0]], [[1.0, 0.0, 0.0, 2.0]]])
  got = np.asarray(llama.apply_rope(x, table))
  np.testing.assert_allclose(got[0, 0], [1, 0, 0, 2])
  angles = 3.0, 3.0 / 10
  expected = [math.cos(angles[0]), -2 * math.sin(angles[1]), math.sin(angles[0]), 0]
  expected[3] = 2 * math.cos(angles[1])
  np.testing.assert_allclose(got[1, 0], expected, rtol=1e-6)
