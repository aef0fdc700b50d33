"""How close the engine comes to what this machine can do: `python -m experiments.engine_speed`.

Prefill: one step over a whole prompt, attention included, against plain 2-D products of the same
shapes in their fastest form. Decode: a step of 8 rows against reading the weights once at the
measured memory bandwidth. All in one process, in interleaved rounds; medians. The last line is one
JSON document; --record appends it to results/.
"""

import json
import pathlib
import statistics

from absl import app, flags, logging

from jaxserve.engine import devices

devices.set_up()

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from experiments import provenance  # noqa: E402
from experiments.engine_speed import limits  # noqa: E402
from jaxserve.engine import SamplingParams, startup  # noqa: E402

FLAGS = flags.FLAGS
_MODEL = flags.DEFINE_string("model", "smollm2-135m", "As for jaxserve.main.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "As for jaxserve.main.")
_PROMPT = flags.DEFINE_integer("prompt", 4096, "Tokens of the prefill.", lower_bound=2)
_ROWS = flags.DEFINE_integer("rows", 8, "Rows of the decode steps.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", 128, "Context of the decode steps.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds; each measures everything once.", lower_bound=1)
_CACHE = flags.DEFINE_string("cache_dir", "~/.cache/jaxserve", "As for jaxserve.main.")
_RECORD = flags.DEFINE_bool("record", False, "Append the result to results/.")


def prefill_seconds(engine, prompt):
  engine.submit(prompt, SamplingParams(max_tokens=1))
  (events,) = steps(engine)
  return events.done_s - events.dispatched_s


def decode_seconds(engine, prompt, rows, tokens=24):
  for _ in range(rows):
    engine.submit(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
  ends = [e.done_s for e in steps(engine) if all(not s.is_prefill for s in e.scheduled)]
  return statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False))


def steps(engine):
  found = []
  while events := engine.step():
    found.append(events)
  return found


def measure(engine, weight_bytes):
  model, dtype = engine.config.model, jnp.dtype(engine.config.dtype)
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, model.vocab_size, _PROMPT.value).tolist()
  short = prompt[: _CONTEXT.value]
  products, product_flops = limits.plain_products(model, _PROMPT.value, dtype)
  bandwidth = limits.read_bandwidth()
  prefill_seconds(engine, prompt), decode_seconds(engine, short, _ROWS.value)
  rounds = []
  for number in range(_ROUNDS.value):
    best = limits.product_flops_per_s(products, product_flops)
    prefill = prefill_seconds(engine, prompt)
    achieved = limits.prefill_flops(model, _PROMPT.value) / prefill
    read = bandwidth()
    decode = decode_seconds(engine, short, _ROWS.value)
    rounds.append({
      "matmul_gflops": best / 1e9,
      "prefill_gflops": achieved / 1e9,
      "prefill_fraction": achieved / best,
      "prefill_tokens_per_s": _PROMPT.value / prefill,
      "read_gb_s": read / 1e9,
      "decode_step_ms": 1e3 * decode,
      "decode_fraction": weight_bytes / read / decode,
    })  # fmt: skip
    logging.info("Round %d: %s", number + 1, {k: round(v, 3) for k, v in rounds[-1].items()})
  return {key: round(statistics.median(r[key] for r in rounds), 4) for key in rounds[0]}


def main(_):
  logging.set_verbosity(logging.INFO)
  options = startup.StartOptions(
    model=_MODEL.value,
    cache_dir=pathlib.Path(_CACHE.value).expanduser(),
    dtype=_DTYPE.value,
    budget=_PROMPT.value,
    max_num_seqs=max(_ROWS.value, 8),
    max_model_len=_PROMPT.value + 64,
    kv_cache_tokens=2 * (_PROMPT.value + 64) + 2 * _ROWS.value * (_CONTEXT.value + 128),
  )
  started = startup.start(options)
  result = measure(started.engine, started.weight_bytes)
  result |= {
    "model": started.checkpoint.name, "dtype": _DTYPE.value, "prompt": _PROMPT.value,
    "rows": _ROWS.value, "context": _CONTEXT.value, "weight_mb": started.weight_bytes / 1e6,

  }  # fmt: skip
  for name, value in result.items():
    print(f"{name:22} {value}")
  print(
    f"\nprefill reaches {result['prefill_fraction']:.0%} of plain products (bar: 25%); a decode "
    f"step reads the weights at {result['decode_fraction']:.0%} of the bandwidth (bar: 30%)"
  )
  result |= provenance.collect()
  if _RECORD.value:
    provenance.append(__file__, result)
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
