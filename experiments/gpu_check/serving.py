"""The experiment of the README on this device: decoders, one long prompt, a range of budgets.

A whole engine with random Llama-3-8B weights in bfloat16, made on the device: 32 requests decode at
2,048 tokens of context, a prompt of 32,768 arrives, and every step's time stands beside the one
that `jaxserve.cost` predicts from the ceilings of this run, and from its table of devices.
"""

import functools
import gc
import itertools
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_check.decode import measured_ceilings
from experiments.gpu_check.stages import Failed
from jaxserve import cost, cost_tables, sched
from jaxserve.config import CacheConfig, ModelConfig, RopeConfig, SchedulerConfig
from jaxserve.engine import Engine, EngineConfig, SamplingParams
from jaxserve.model import llama

LLAMA3_8B = ModelConfig(
  vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
  num_kv_heads=8, head_dim=128, rope=RopeConfig(theta=500_000.0), max_position=65536,
)  # fmt: skip
TINY = ModelConfig(
  vocab_size=131, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
  head_dim=8, max_position=256,
)  # fmt: skip
_SETTLE, _QUIET = 4, 16  # steps of decodes alone: left out, and timed


def cases(settings, records):
  shared = Shared(settings, measured_ceilings(records))
  for group in settings.budgets:
    for budget in group:
      yield name(budget), functools.partial(check, budget, group, shared)


def name(budget):
  return f"budget {budget or 'off'}"


class Shared:
  """Weights, made once, and the engine of one group of budgets at a time."""

  def __init__(self, settings, ceilings):
    self.settings, self.ceilings = settings, ceilings
    self.model = TINY if settings.interpret else LLAMA3_8B
    self._weights = self._engine = self._group = None

  def engine(self, group):
    """The engine of a group, its decoders at their context and decoding."""
    if self._group != group:
      if self._engine is not None:  # the next one needs its memory
        self._engine.close()
        self._engine = None
        gc.collect()
      self._weights = self._weights or random_weights(self.model)
      self._engine, self._group = self._build(group), group
      self._engine.warm_up()
      self._fill(self._engine)
    return self._engine

  def _build(self, group):
    settings, seats = self.settings, self.settings.decoders + 1
    whole = settings.prompt + settings.decoders
    budgets = sorted({budget or whole for budget in group})
    longest = max(settings.prompt, settings.context) + self.outputs() + 1
    decoders = settings.decoders * (settings.context + self.outputs())
    page = settings.shape.page_size
    scheduler = SchedulerConfig(
      cache=CacheConfig(num_pages=-(-(decoders + longest) // page) + 2 * seats, page_size=page),
      max_num_seqs=seats, max_requests=seats, max_budget=budgets[-1], max_model_len=longest,
    )  # fmt: skip
    config = EngineConfig(
      model=self.model, scheduler=scheduler, token_buckets=(settings.decoders, *budgets),
    )  # fmt: skip
    return Engine.build(config, *self._weights, store=settings.store)

  def outputs(self):
    """Most tokens of a decoder: as many as there are steps, over all budgets of a group."""
    settings, most = self.settings, 0
    for group in settings.budgets:
      chunks = [(budget or settings.prompt + settings.decoders) - settings.decoders
                for budget in group]  # fmt: skip
      filling = math.ceil(settings.decoders * settings.context / max(chunks))
      steps = sum(math.ceil(settings.prompt / c) + 3 * (_SETTLE + _QUIET) for c in chunks)
      most = max(most, filling + steps)
    return most

  def _fill(self, engine):
    """Prefills the decoders, by the engine itself."""
    settings, rng = self.settings, np.random.default_rng(np.random.SeedSequence().entropy)
    largest = engine.config.scheduler.max_budget
    engine.set_params(sched.make_params(engine.config.scheduler, budget=largest))
    sampling = SamplingParams(max_tokens=self.outputs(), ignore_eos=True)
    for _ in range(settings.decoders):
      engine.submit(rng.integers(0, self.model.vocab_size, settings.context).tolist(), sampling)
    while any(part.is_prefill for part in engine.step().scheduled):
      pass


def random_weights(model):
  """(graphdef, leaves) in bfloat16, drawn on the device."""
  params, key = {}, jax.random.key(np.random.SeedSequence().generate_state(1)[0])

  @functools.partial(jax.jit, static_argnames=("shape", "scale"))
  def matrix(key, shape, scale):
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale)

  for i, (path, shape) in enumerate(llama.param_shapes(model).items()):
    leaf = path.rsplit(".", 1)[-1]
    if leaf in llama.NORMS:
      params[path] = jnp.ones(shape, jnp.float32)
      continue
    depth = 2 * model.num_layers if leaf in ("o", "down") else 1
    params[path] = matrix(jax.random.fold_in(key, i), shape, 1 / math.sqrt(shape[1] * depth))
  return llama.load(model, params, jnp.dtype("bfloat16"))


def check(budget, group, shared):
  """Steps of decodes alone, then those of the prompt."""
  settings, engine = shared.settings, shared.engine(group)
  whole = settings.prompt + settings.decoders
  params = sched.make_params(engine.config.scheduler, budget=budget or whole)
  engine.set_params(params)
  before = [engine.step() for _ in range(_SETTLE + _QUIET)]
  rng = np.random.default_rng(np.random.SeedSequence().entropy)
  prompt = rng.integers(0, shared.model.vocab_size, settings.prompt).tolist()
  request = engine.submit(prompt, SamplingParams(max_tokens=1))
  found, arrived = [before[-1]], False
  while True:
    found.append(engine.step())
    mine = [p for p in found[-1].scheduled if p.request_id == request]
    arrived = arrived or bool(mine)
    if arrived and not mine:
      break
  for _ in range(_SETTLE):
    engine.step()
  if engine.retraces:
    raise Failed(f"{engine.retraces} compilations after start-up", retraces=engine.retraces)
  values = summary(budget, before[_SETTLE:], found, request, shared)
  return values | {"attention": engine.config.attention}


def summary(budget, quiet, found, request, shared):
  """Times of steps that carry the prompt, measured and predicted, in milliseconds."""
  steps = []
  for last, step in itertools.pairwise(found):
    chunk = next((p for p in step.scheduled if p.request_id == request), None)
    if chunk is None:
      continue
    others = [p for p in step.scheduled if p.request_id != request]
    resident = sum(p.start + p.tokens for p in others)
    steps.append({
      "chunk": chunk.tokens, "prefix": chunk.start, "decodes": len(others), "resident": resident,
      "bucket": step.bucket, "ms": 1e3 * (step.done_s - last.done_s),
      **predictions(chunk.tokens, chunk.start, len(others), resident, shared),
    })  # fmt: skip
  gaps = [1e3 * (b.done_s - a.done_s) for a, b in itertools.pairwise(quiet)]
  rows = len(quiet[-1].scheduled)
  context = sum(p.start + p.tokens for p in quiet[-1].scheduled) / rows
  error = [step["ms"] / step["predicted_ms"] for step in steps]
  return {
    "budget": budget, "steps": steps, "decode_ms": statistics.median(gaps),
    "decode_predicted_ms": 1e3 * cost.decode_seconds(*shared_cost(shared), rows, context),
    "longest_ms": max(s["ms"] for s in steps), "total_ms": sum(s["ms"] for s in steps),
    "predicted_total_ms": sum(s["predicted_ms"] for s in steps),
    "longest_predicted_ms": max(s["predicted_ms"] for s in steps),
    "measured_over_predicted": statistics.median(error),
  }  # fmt: skip


def shared_cost(shared):
  """The model, and the device at the ceilings measured in this run."""
  ceilings = shared.ceilings
  hardware = cost.Hardware(
    name=ceilings.name, flops=ceilings.flops, bandwidth=ceilings.copy,
    spec_flops=ceilings.flops, spec_bandwidth=ceilings.copy,
  )  # fmt: skip
  return cost.ModelCost.of(shared.model), hardware


def predictions(chunk, prefix, rows, resident, shared):
  model, hardware = shared_cost(shared)
  ms = lambda device: (
    1e3 * cost.chunk_seconds(model, device, chunk, prefix, rows=rows, resident=resident)
  )
  found = {"predicted_ms": ms(hardware)}
  known = cost_tables.device_of_kind(jax.devices()[0].device_kind)
  if known is not None:
    found["table_ms"] = ms(known.hardware)
  return found
