"""The whole engine on a small random Llama: the GPU kernels against XLA's attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_check.stages import Failed
from jaxserve.config import CacheConfig, ModelConfig, SchedulerConfig
from jaxserve.engine import Engine, EngineConfig, SamplingParams
from jaxserve.model import llama

# Logits have a standard deviation of about one. Both round to bfloat16 in other places.
LIMIT = 0.15
_NEW_TOKENS = 24
_LONGEST = 1024


def cases(settings, records):
  del records
  heads = ((64, 8, 2), (128, 8, 2)) if not settings.interpret else ((16, 4, 2),)
  for head_dim, num_heads, kv_heads in heads:
    fields = {"head_dim": head_dim, "num_heads": num_heads, "num_kv_heads": kv_heads}
    yield f"engine D={head_dim}", functools.partial(check, fields, settings)


def model_of(fields, settings):
  width = fields["head_dim"] * fields["num_heads"]
  return ModelConfig(
    vocab_size=997, hidden_size=width, intermediate_size=2 * width,
    num_layers=1 if settings.interpret else 4, max_position=_LONGEST, **fields,
  )  # fmt: skip


def check(fields, settings):
  """Greedy tokens and the logits behind them, up to the first token that differs."""
  model = model_of(fields, settings)
  rng = np.random.default_rng(np.random.SeedSequence().entropy)
  scale = 16 if settings.interpret else 1
  lengths = [max(n // scale, 1) for n in (1, 63, 130, 300, 515, 700)]
  prompts = [rng.integers(0, model.vocab_size, n).tolist() for n in lengths]
  params = llama.random_params(model, int(rng.integers(2**31)))
  names = ("ref", "xla") if settings.interpret else ("xla", "mosaic_gpu")
  runs = [serve(name, model, params, prompts, settings) for name in names]
  values = compare(*runs) | {"limit": LIMIT, "against": names[0], "attention": names[1]}
  if not values["logits_error"] <= LIMIT:
    raise Failed(f"logits differ by {values['logits_error']:.2g}", **values)
  return values


def serve(attention, model, params, prompts, settings):
  """{prompt: [(token, {id: logit of the likeliest})]} of every output."""
  budget = 32 if settings.interpret else 256
  scheduler = SchedulerConfig(
    cache=CacheConfig(num_pages=16 if settings.interpret else 64, page_size=64),
    max_num_seqs=8, max_requests=8, max_budget=budget, max_model_len=_LONGEST,
  )  # fmt: skip
  config = EngineConfig(
    model=model, scheduler=scheduler, attention=attention, token_buckets=(8, budget)
  )
  graphdef, leaves = llama.load(model, params, jnp.dtype(config.dtype))
  engine = Engine.build(config, graphdef, leaves, store=settings.store)
  try:
    sampling = SamplingParams(max_tokens=6 if settings.interpret else _NEW_TOKENS)
    numbers = {engine.submit(prompt, sampling): i for i, prompt in enumerate(prompts)}
    found = {i: [] for i in range(len(prompts))}
    while events := engine.step():
      for event in events.outputs:
        logits = dict(zip(event.top_ids, event.top_logits, strict=True))
        found[numbers[event.request_id]].append((event.token, logits))
    return found
  finally:
    engine.close()
    jax.block_until_ready(leaves)


def compare(reference, other):
  """Agreement of two runs; logits are compared while the contexts are the same."""
  errors, same, total, parted = [], 0, 0, 0
  for i, outputs in reference.items():
    if len(outputs) != len(other[i]):
      raise Failed(f"prompt {i}: {len(outputs)} and {len(other[i])} outputs")
    total += len(outputs)
    for (token, logits), (other_token, other_logits) in zip(outputs, other[i], strict=True):
      shared = logits.keys() & other_logits.keys()
      errors.extend(abs(logits[t] - other_logits[t]) for t in shared)
      if not shared or token != other_token:
        parted += 1
        break
      same += 1
  finite = all(np.isfinite(errors)) and len(errors) > 0
  return {
    "logits_error": float(max(errors)) if finite else "nan",
    "same_tokens": same, "tokens": total, "streams_that_part": parted, "compared": len(errors),
  }  # fmt: skip
