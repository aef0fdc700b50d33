"""The functions an engine compiles, with the shapes they are compiled for.

Scheduler, on its own CPU device: init, submit, abort, schedule, commit; lay_out for a few token
counts. Model: empty (its state), upload (a prompt and its sampling options), forward per token
bucket, sample per row bucket.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxserve import sched
from jaxserve.config import PlanShape, SchedulerConfig
from jaxserve.engine.config import EngineConfig, bucket_for
from jaxserve.engine.devices import Devices
from jaxserve.engine.executables import Key
from jaxserve.engine.sampling_row import empty_sampling_table
from jaxserve.model import multi_step, scoring, verify
from jaxserve.model import step as model_step
from jaxserve.model.kv_cache import KVCache, init_kv
from jaxserve.model.logit_edits import num_words
from jaxserve.pytree import pack, unpack
from jaxserve.sched import packing
from jaxserve.types import SamplingTable, pack_plan
from jaxserve.types.plan import packed_size

Leaves = tuple[jax.Array | jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A function, the abstract arguments to compile it for, and what it may overwrite."""

  key: Key
  fn: Callable[..., Any]
  args: tuple[Any, ...]
  donate: tuple[int, ...] = ()
  compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class ModelState:
  """What lives on the model's device between steps. Every field is donated and replaced."""

  kv: KVCache
  token_table: jax.Array
  sampling: SamplingTable


def empty_model_state(config: EngineConfig, platform: str) -> ModelState:
  """No tokens, no KV, as arrays on the default device, for a model on a device of `platform`."""
  scheduler = config.scheduler
  return ModelState(
    kv=init_kv(config.model, scheduler.cache, jnp.dtype(config.dtype), platform, config.kv_dtype),
    token_table=jnp.zeros((scheduler.max_requests, scheduler.max_model_len), jnp.int32),
    sampling=empty_sampling_table(scheduler.max_requests, config.model.vocab_size),
  )


def _empty(zero: jax.Array, *, config: EngineConfig, platform: str) -> dict[str, Any]:
  """The fields of an empty `ModelState`, on the device of `zero`, i32[]."""
  fields = vars(empty_model_state(config, platform))
  return fields | {"token_table": fields["token_table"] + zero}


def _init(zero: jax.Array, *, config: SchedulerConfig) -> packing.PackedState:
  """No request, every page free, on the device of `zero`, i32[]."""
  return packing.pack_state(dataclasses.replace(sched.init(config), num_submitted=zero))


def upload(
  token_table: jax.Array, sampling: SamplingTable, slot: jax.Array, prompt: jax.Array,
  options: SamplingTable,
) -> tuple[jax.Array, SamplingTable]:  # fmt: skip
  """Writes a prompt, i32[max_model_len], and its sampling options at a request's slot."""
  table = jax.tree.map(lambda column, value: column.at[slot].set(value), sampling, options)
  return token_table.at[slot].set(prompt), table


def allow(sampling: SamplingTable, slots: jax.Array, masks: jax.Array) -> SamplingTable:
  """Writes masks, u32[R, W], of allowed tokens at slots, i32[R]; those out of range are dropped."""
  allowed = sampling.edits.allowed.at[slots].set(masks, mode="drop", unique_indices=True)
  edits = dataclasses.replace(sampling.edits, allowed=allowed)
  return dataclasses.replace(sampling, edits=edits)


def _submit(
  state: Any, num_prompt: Any, max_total: Any, priority: Any, await_host: Any, *reuse: Any
) -> Any:
  names = ("digests", "num_digests", "reads_cache")
  return sched.submit(
    state, num_prompt, max_total, priority=priority, await_host=await_host,
    **dict(zip(names, reuse, strict=bool(reuse))),
  )  # fmt: skip


def _lay_out(
  state: packing.PackedState, decision: jax.Array, *, shape: PlanShape, config: SchedulerConfig
) -> jax.Array:
  unpacked = unpack(decision, packing.decision_like(config))
  return pack_plan(sched.lay_out(packing.unpack_state(state, config), unpacked, shape))


def _abstract(tree: Any, device: jax.Device) -> Any:
  sharding = SingleDeviceSharding(device)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding), tree
  )


def scheduler_programs(config: EngineConfig, devices: Devices) -> Iterator[Program]:
  """What runs on the scheduler's device, on packed records; a key ends with the policy."""
  for shapes in config.schedulers:
    yield from _policy_programs(config, shapes, devices)


def _policy_programs(
  config: EngineConfig, shapes: SchedulerConfig, devices: Devices
) -> Iterator[Program]:
  policy = shapes.policy
  here = functools.partial(_abstract, device=devices.scheduler)
  number, flag = here(np.int32(0)), here(np.bool_(False))
  init = functools.partial(_init, config=shapes)
  state = here(jax.eval_shape(init, number))
  params = here(packing.pack_params(sched.make_params(shapes)))
  mask = here(np.zeros(shapes.max_requests, bool))
  schedule = functools.partial(packing.schedule, config=shapes)
  commit = functools.partial(packing.commit, config=shapes)
  abort, submit = (
    functools.partial(packing.call, fn, config=shapes) for fn in (sched.abort, _submit)
  )
  decision = here(jax.eval_shape(pack, packing.decision_like(shapes)))
  chains = np.zeros((shapes.pages_per_request, 4), np.uint32)
  prefix = here((chains, np.int32(0), np.bool_(False))) if shapes.prefix_cache else ()
  new = (here(np.zeros((shapes.max_requests, 4), np.uint32)),) if shapes.prefix_cache else ()
  yield Program(key=("init", policy), fn=init, args=(number,))
  yield Program(key=("schedule", policy), fn=schedule, args=(state, params), donate=(0,))
  if config.decode_steps > 1:
    ahead = functools.partial(
      packing.schedule_ahead,
      config=shapes, shape=config.plan_shape(config.decode_buckets[-1]), most=config.decode_steps,
    )  # fmt: skip
    yield Program(key=("schedule_ahead", policy), fn=ahead, args=(state, params), donate=(0,))
  arguments: tuple[Any, ...] = (state, decision, mask, *new)
  if shapes.max_drafts:
    arguments += (here(np.zeros((2, shapes.max_requests), np.int32)),)
  yield Program(key=("commit", policy), fn=commit, args=arguments, donate=(0,))
  yield Program(key=("abort", policy), fn=abort, args=(state, mask), donate=(0,))
  arguments = (state, number, number, number, flag, *prefix)
  yield Program(key=("submit", policy), fn=submit, args=arguments, donate=(0,))
  for tokens in config.layouts:
    lay_out = functools.partial(_lay_out, shape=config.plan_shape(tokens), config=shapes)
    yield Program(key=("lay_out", tokens, policy), fn=lay_out, args=(state, decision))


def _sample(config: EngineConfig, graphdef: nnx.GraphDef, rows: int) -> Callable[..., Any]:
  if config.speculate is None:
    return functools.partial(model_step.sample, graphdef=graphdef, rows=rows)
  return functools.partial(
    verify.verify,
    graphdef=graphdef,
    places=rows,
    rows=min(rows, config.scheduler.max_num_seqs),
    max_drafts=config.speculate.k,
    drafter=config.speculate.lookup,
  )


def model_programs(
  config: EngineConfig, graphdef: nnx.GraphDef, leaves: Leaves, devices: Devices
) -> Iterator[Program]:
  """What runs on the model's device, the largest bucket first: it takes longest to compile."""
  here = functools.partial(_abstract, device=devices.model)
  platform, attention = devices.model.platform, config.attention
  assert attention != "auto", "engine.attention.resolve replaces it"
  empty, number = functools.partial(_empty, config=config, platform=platform), here(np.int32(0))
  parts = here(jax.eval_shape(empty, number))
  kv, tokens, sampling = parts["kv"], parts["token_table"], parts["sampling"]
  weights, options = here(leaves), model_step.compiler_options(platform)
  shapes = config.scheduler
  places = config.plan_shape(config.buckets[-1]).num_samples
  hidden = here(np.zeros((places, config.model.hidden_size), np.float32))
  row_fields = here(np.zeros((4 if config.speculate else 3, places), np.int32))
  for bucket in reversed(config.buckets):
    shape = config.plan_shape(bucket)
    forward = functools.partial(
      model_step.forward,
      graphdef=graphdef, config=config.model, shape=shape, dtype=jnp.dtype(config.dtype),
      # A switch waits for the host on a GPU, and a step would have four of them in every layer.
      attention=attention, unroll=platform == "gpu",
    )  # fmt: skip
    plan = here(np.zeros(packed_size(shape), np.int32))
    yield Program(
      key=("forward", bucket), fn=forward, args=(weights, kv, tokens, plan), donate=(1,),
      compiler_options=options,
    )  # fmt: skip
  if config.decode_steps > 1:
    yield from _decode_programs(config, graphdef, (weights, kv, tokens, sampling), devices)
  for rows in reversed(config.rows):
    sample = _sample(config, graphdef, rows)
    arguments = (weights, hidden, tokens, sampling, row_fields)
    yield Program(
      key=("sample", rows), fn=sample, args=arguments, donate=(2,), compiler_options=options
    )
  yield Program(key=("empty",), fn=empty, args=(number,))
  prompt = here(np.zeros(shapes.max_model_len, np.int32))
  row = here(jax.tree.map(lambda column: np.zeros(column.shape[1:], column.dtype), sampling))
  arguments = (tokens, sampling, number, prompt, row)
  yield Program(key=("upload",), fn=upload, args=arguments, donate=(0, 1))
  slots = here(np.zeros(shapes.max_num_seqs, np.int32))
  masks = here(np.zeros((shapes.max_num_seqs, num_words(config.model.vocab_size)), np.uint32))
  yield Program(key=("allow",), fn=allow, args=(sampling, slots, masks), donate=(0,))
  if config.score_prompts:
    yield from _scoring_programs(config, graphdef, weights, devices)


def _decode_programs(
  config: EngineConfig, graphdef: nnx.GraphDef, arguments: tuple[Any, ...], devices: Devices
) -> Iterator[Program]:
  here, platform = functools.partial(_abstract, device=devices.model), devices.model.platform
  attention = config.attention
  assert attention != "auto", "engine.attention.resolve replaces it"
  for bucket in reversed(config.decode_buckets):
    shape = config.plan_shape(bucket)
    decode = functools.partial(
      multi_step.decode_steps,
      graphdef=graphdef, config=config.model, shape=shape, dtype=jnp.dtype(config.dtype),
      rows=bucket_for(min(bucket, config.rows[-1]), config.rows), attention=attention,
      unroll=platform == "gpu",
    )  # fmt: skip
    plans = here(np.zeros((config.decode_steps, packed_size(shape)), np.int32))
    yield Program(
      key=("decode_steps", bucket), fn=decode, args=(*arguments, plans, here(np.int32(0))),
      donate=(1, 2), compiler_options=model_step.compiler_options(platform),
    )  # fmt: skip


def _scoring_programs(
  config: EngineConfig, graphdef: nnx.GraphDef, weights: Any, devices: Devices
) -> Iterator[Program]:
  here, width = functools.partial(_abstract, device=devices.model), config.model.hidden_size
  number = here(np.int32(0))
  for bucket in config.buckets:
    arguments: tuple[Any, ...] = (here(np.zeros((bucket, width), np.float32)), number)
    yield Program(key=("score_rows", bucket), fn=scoring.rows, args=arguments)
  score = functools.partial(scoring.score, graphdef=graphdef, eps=config.model.rms_norm_eps)
  hidden, targets = np.zeros((scoring.BLOCK, width), np.float32), np.zeros(scoring.BLOCK, np.int32)
  options = model_step.compiler_options(devices.model.platform)
  arguments = (weights, here(hidden), here(targets))
  yield Program(key=("score",), fn=score, args=arguments, compiler_options=options)
