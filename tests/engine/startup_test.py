"""Starting an engine: defaults by device, pool sizes, the in-place cache, log lines."""

import jax
import numpy as np
import pytest

from jaxserve.engine import SamplingParams, compiler, defaults, devices, programs, startup
from jaxserve.engine.config import EngineConfig
from jaxserve.model import llama
from tests.testing.caches import cache_dir
from tests.testing.engines import MODEL, SCHEDULER, weights

GIB = 1 << 30


@pytest.mark.parametrize(
  "platform, kind, memory, use, expected",
  [
    ("gpu", "NVIDIA B200", 180, "offline", (16384, 1024)),
    ("gpu", "NVIDIA B200", 180, "server", (16384, 1024)),
    ("gpu", "NVIDIA H100 80GB HBM3", 80, "offline", (16384, 1024)),
    ("gpu", "NVIDIA H100 80GB HBM3", 80, "server", (8192, 1024)),
    ("gpu", "NVIDIA A100-SXM4-80GB", 80, "server", (2048, 256)),
    ("gpu", "NVIDIA L4", 24, "offline", (8192, 256)),
    ("cpu", "cpu", 500, "server", (2048, 256)),
  ],
)
def test_defaults_by_device(platform, kind, memory, use, expected):
  limits = defaults.by_device(platform, kind, memory * GIB, use)
  assert (limits.budget, limits.max_num_seqs) == expected


def test_only_defaulted_values_are_clamped():
  limits = defaults.Limits(budget=2048, max_num_seqs=256)
  clamp = lambda *args: tuple(vars(defaults.clamped(limits, *args)).values())
  assert clamp(None, None, 8192) == (2048, 256)
  assert clamp(None, 2, 100) == (200, 2)
  assert clamp(64, None, 8192) == (64, 64)
  assert clamp(4096, 2, 100) == (4096, 2)


def forward_reports(num_pages, dtype, buckets=(1, 2, 8)):
  import dataclasses

  cache = dataclasses.replace(SCHEDULER.cache, num_pages=num_pages)
  scheduler = dataclasses.replace(SCHEDULER, cache=cache, max_budget=buckets[-1])
  config = EngineConfig(
    model=MODEL, scheduler=scheduler, dtype=dtype, attention="xla", token_buckets=buckets
  )
  graphdef, leaves = llama.load(MODEL, weights(), np.dtype(dtype))
  made = programs.model_programs(config, graphdef, leaves, devices.pick())
  table = compiler.compile_all([p for p in made if p.key[0] == "forward"])
  kv = programs.empty_model_state(config, "cpu").kv
  return sum(x.nbytes for x in jax.tree.leaves(kv)), {r.key: r for r in table.reports}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_executables_scratch_grows_with_the_pool(dtype):
  small_bytes, small = forward_reports(23, dtype)
  large_bytes, large = forward_reports(2300, dtype)
  assert large_bytes == 100 * small_bytes
  for key, report in large.items():
    assert report.alias_bytes >= large_bytes
    assert report.temp_bytes <= small[key].temp_bytes + 4096, key


def options(**fields):
  base = dict(model="random", cache_dir=cache_dir(), max_num_seqs=4, max_model_len=64, budget=16)
  return startup.StartOptions(**(base | fields))


def test_memory_fraction_fills_the_pool_with_what_is_left(monkeypatch):
  memory = 40_000_000
  monkeypatch.setattr(defaults, "memory_bytes", lambda device: memory)
  started = startup.start(options(memory_fraction=0.5))
  engine = started.engine
  scratch = max(r.temp_bytes for r in engine.compile_reports if r.key == ("forward", 16))
  used = started.weight_bytes + scratch + engine.kv_bytes
  page_bytes = engine.kv_bytes // engine.config.scheduler.cache.num_pages
  assert 0 <= memory // 2 - used < page_bytes + 1
  engine.close()
  with pytest.raises(ValueError, match=r"memory_fraction=0.001: leaves room for 0 tokens"):
    startup.start(options(memory_fraction=0.001))


def test_start_up_says_what_it_did():
  started = startup.start(options(kv_cache_tokens=320))
  lines = "\n".join(startup.summary(started))
  for words in ("Model random", "KV pool: 320 tokens in 5 pages of 64", "Buckets: 1, 4, 8, 12, 16",
                "executables in", "forward 16", "in place"):  # fmt: skip
    assert words in lines
  started.engine.close()


def test_quantized_weights_are_served():
  small = dict(kv_cache_tokens=320, budget=2, max_num_seqs=2)
  started = startup.start(options(quantize="int8", **small))
  model = started.checkpoint.config
  matrices = model.num_params - 2 * model.vocab_size * model.hidden_size
  assert started.weight_bytes < 1.1 * (matrices + 3 * model.vocab_size * model.hidden_size)
  assert "MB of int8 weights" in startup.summary(started)[0]
  (done,) = started.engine.generate([[72, 105]], SamplingParams(max_tokens=5))
  assert len(done.tokens) == 5 and started.engine.retraces == 0
  started.engine.close()


@pytest.mark.parametrize(
  ("platform", "seats", "expected"),
  [
    ("gpu", None, (32, 2048, 4096, 16384)),
    ("cpu", None, (8, 512, 4096, 16384)),
    ("cpu", 3, (2, 512, 4096, 12288)),
    ("gpu", 1, (1, 2048, 4096, 4096)),
  ],
)
def test_load_of_a_target(platform, seats, expected):
  load = defaults.target_load(platform, 256, seats, 4096, 16)
  assert (load.decoders, load.context, load.max_prefix, load.max_budget) == expected
  assert load.page_size == 16
  assert defaults.target_load(platform, 256, seats, 100, 16).context == 100


@pytest.mark.parametrize(("seats", "seats_then"), [(4, 4), (None, 24)])
def test_a_solved_budget_is_a_budget_as_if_given(seats, seats_then):
  asked = []
  resolved = startup._resolve(
    options(
      budget=None, max_num_seqs=seats, solve_budget=lambda *case: asked.append(case) or 24
    ),
    MODEL,
    devices.pick().model,
  )  # fmt: skip
  assert (resolved.budget, resolved.max_num_seqs) == (24, seats_then)
  ((model, device, load),) = asked
  assert model is MODEL and device == devices.pick().model
  assert (load.decoders, load.max_prefix, load.page_size) == (3 if seats else 8, 64, 64)
  with pytest.raises(ValueError, match="budget=24.*max_model_len=64"):
    startup._resolve(
      options(budget=None, chunked_prefill=False, solve_budget=lambda *case: 24),
      MODEL,
      devices.pick().model,
    )


def test_unchunked_budget_defaults_to_a_whole_sequence_and_a_smaller_one_is_refused():
  refused = options(chunked_prefill=False)
  with pytest.raises(ValueError, match="budget=16.*max_model_len=64"):
    startup.start(refused)
  resolved = startup._resolve(
    options(chunked_prefill=False, budget=None), MODEL, devices.pick().model
  )
  assert resolved.budget >= 64


def test_a_second_start_compiles_nothing_with_a_pool_sized_by_memory_too(tmp_path):
  fields = dict(
    cache_dir=tmp_path, memory_fraction=0.01, attention="ref", budget=2, max_num_seqs=2,
    prefix_cache=False,
  )  # fmt: skip
  startup.start(options(**fields)).engine.close()
  compiled = []
  listen = lambda event, seconds, **_: compiled.append(event) if "backend" in event else None
  jax.monitoring.register_event_duration_secs_listener(listen)
  again = startup.start(options(**fields))
  jax.monitoring.unregister_event_duration_listener(listen)
  assert all(r.cache_hit for r in again.engine.compile_reports) and not compiled
  again.engine.close()


def test_buckets_of_ones_own_hold_every_budget_too():
  resolved = startup._resolve(options(token_buckets=(5, 3)), MODEL, jax.devices()[0])
  assert startup._buckets(resolved, 16, (64,)) == (3, 5, 16, 64)
  with pytest.raises(ValueError, match=r"token_buckets=\(17,\).*budget of 16"):
    startup._buckets(options(token_buckets=(17,)), 16, ())
  with pytest.raises(ValueError, match="bucket_shaped"):
    startup._buckets(options(token_buckets=(8,), policy="bucket_shaped"), 16, ())
