"""From options to a running engine: weights, KV pool size, executables."""

import concurrent.futures
import dataclasses
import gc
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from absl import logging
from flax import nnx

from jaxserve import sched
from jaxserve.config import CacheConfig, ModelConfig, Ordering, SchedulerConfig
from jaxserve.engine import attention, clock, compiler, defaults, devices, drafting, programs
from jaxserve.engine.config import Attention, EngineConfig, token_buckets
from jaxserve.engine.engine import Engine
from jaxserve.engine.speculation import Speculate
from jaxserve.engine.store import ExecutableStore
from jaxserve.model import llama, source
from jaxserve.model.checkpoint import Checkpoint, Dtype
from jaxserve.model.kv_cache import KVDtype
from jaxserve.model.quantize import Quantize
from jaxserve.sched import policies

# The budget for a model on a device under a load.
SolveBudget = Callable[[ModelConfig, jax.Device, defaults.Load], int]
Shapes = tuple[jax.Array | jax.ShapeDtypeStruct, ...]
_PROBE_PAGES = 2  # with one, XLA:CPU copies the pool
_WAITING_PER_SEAT = 1  # slots of the waiting queue for every seat


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartOptions:
  """What the user asked for; None means a default by device or model.

  Attributes:
    model: see `jaxserve.model.source.load_checkpoint`.
    cache_dir: private folder of converted models and compiled executables.
    dtype: of weights, products and KV.
    quantize: "int8" or "int4" stores the matrices of the layers in so many bits.
    kv_dtype: of KV pages, see `EngineConfig`.
    use: "server" favours latency, "offline" throughput.
    budget: most tokens of a step.
    solve_budget: gives the budget in the place of `budget`, once model and device are known.
    other_budgets: further budgets that the bucket table must cover.
    token_buckets: token counts to compile for, beside the budgets; None: `config.token_buckets`.
    max_num_seqs: most running requests.
    long_prefill_token_threshold: most tokens of one request a step; 0 = off.
    chunked_prefill: prompts may be split.
    max_model_len: most tokens of a request.
    page_size: tokens of a KV page.
    kv_cache_tokens: size of the pool; None: by memory_fraction.
    memory_fraction: of the device's memory for weights, scratch and pool together.
    ordering: of the queue.
    policy: scheduling policy, see `sched.POLICIES`.
    policy_args: hyper-parameters of it that differ from its defaults.
    other_policies: policies that the engine may be switched to.
    attention: implementation of attention, see `engine.attention`.
    speculate: the drafter; None: no speculative decoding.
    decode_steps: most steps of decodes that run without the host between them.
    seed: of the engine.
    prefix_cache: requests that begin alike share what is computed; off where model or policy do not
      go with it.
    cache_salt: of page digests, see `Engine.build`.
    score_prompts: requests may ask for log-probabilities of their prompts.
  """

  model: str
  cache_dir: pathlib.Path
  dtype: Dtype = "bfloat16"
  quantize: Quantize = "none"
  kv_dtype: KVDtype = "auto"
  use: defaults.Use = "server"
  budget: int | None = None
  solve_budget: SolveBudget | None = None
  other_budgets: tuple[int, ...] = ()
  token_buckets: tuple[int, ...] | None = None
  max_num_seqs: int | None = None
  long_prefill_token_threshold: int = 0
  chunked_prefill: bool = True
  max_model_len: int | None = None
  page_size: int = 64
  kv_cache_tokens: int | None = None
  memory_fraction: float | None = None
  ordering: Ordering = "fcfs"
  policy: str = "vllm_v1"
  policy_args: Mapping[str, float] = dataclasses.field(default_factory=dict)
  other_policies: tuple[str, ...] = ()
  attention: Attention = "auto"
  speculate: Speculate | None = None
  decode_steps: int = 1
  seed: int = 0
  prefix_cache: bool = True
  cache_salt: bytes = b""
  score_prompts: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started:
  """A running engine and how long it took to get there.

  Attributes:
    engine: ready to serve.
    checkpoint: what was loaded, without its arrays' second copy being needed.
    options: the options with every default filled in.
    load_s: seconds to read the weights and put them on the device.
    compile_s: seconds to trace and compile.
    weight_bytes: on the device.
  """

  engine: Engine
  checkpoint: Checkpoint
  options: StartOptions
  load_s: float
  compile_s: float
  weight_bytes: int


def start(options: StartOptions) -> Started:
  """Loads the model, sizes the pool, compiles, seals; takes all of it off the garbage collector.

  Raises:
    ValueError: an option is out of range; the message names it.
    NotImplementedError: the device cannot do what `attention` asks for.
  """
  store = ExecutableStore(options.cache_dir / "executables")
  for policy in (options.policy, *options.other_policies):
    sched.find_policy(policy)  # before the long part
    policies.check_drafts(policy, options.speculate.k if options.speculate else 0)
  where = devices.pick()
  begin = clock.now()
  checkpoint = source.load_checkpoint(options.model, options.cache_dir, options.dtype)
  options = _resolve(options, checkpoint.config, where.model)
  choice = attention.choose(
    options.attention, attention.describe(where.model), checkpoint.config, options.page_size,
    options.dtype if options.kv_dtype == "auto" else options.kv_dtype,
  )  # fmt: skip
  dtype = jnp.dtype(options.dtype)
  graphdef, shapes = llama.abstract(checkpoint.config, dtype, options.quantize)
  draft = drafting.load(options.speculate, checkpoint, options.cache_dir, options.dtype)
  config = _engine_config(options, checkpoint, draft, choice, graphdef, shapes, where, store)
  weights = draft and draft.weights
  wanted = Engine.programs(config, graphdef, shapes, weights)
  with concurrent.futures.ThreadPoolExecutor(1) as beside:  # the weights
    reading = beside.submit(_read_ahead, config, wanted, store)
    _, leaves = llama.load(checkpoint.config, checkpoint.params, dtype, options.quantize)
    jax.block_until_ready(leaves)
  reading.result()
  loaded = clock.now()
  params = sched.make_params(
    config.scheduler,
    budget=options.budget,
    long_prefill_token_threshold=options.long_prefill_token_threshold,
    chunked_prefill=options.chunked_prefill,
    policy=options.policy_args,
  )
  engine = Engine.build(
    config, graphdef, leaves, params, options.seed, store, options.cache_salt, weights
  )
  # What start-up left behind stays; a full collection over it would stall a step by 0.15 s.
  gc.collect()
  gc.freeze()
  return Started(
    engine=engine,
    checkpoint=checkpoint,
    options=options,
    load_s=loaded - begin,
    compile_s=clock.now() - loaded,
    weight_bytes=sum(leaf.nbytes for leaf in leaves),
  )


def _read_ahead(
  config: EngineConfig, wanted: list[programs.Program], store: ExecutableStore
) -> None:
  """Begins to read executables, once what they call is there."""
  attention.register(config, store.kernels)
  store.read_ahead(wanted)


def _resolve(options: StartOptions, model: ModelConfig, device: jax.Device) -> StartOptions:
  """Fills in defaults; one log line states the budget after all clamping."""
  max_model_len = options.max_model_len or model.max_position
  chunked, threshold = sched.chunking_allowed(
    model, options.chunked_prefill, options.long_prefill_token_threshold
  )
  memory = defaults.memory_bytes(device)
  by_device = defaults.by_device(device.platform, device.device_kind, memory, options.use)
  if options.solve_budget is not None:
    load = defaults.target_load(
      device.platform, by_device.max_num_seqs, options.max_num_seqs, max_model_len,
      options.page_size,
    )  # fmt: skip
    options = dataclasses.replace(options, budget=options.solve_budget(model, device, load))
  limits = defaults.clamped(by_device, options.budget, options.max_num_seqs, max_model_len)
  budget = limits.budget
  whole = sched.find_policy(options.policy).whole_prompts
  if whole or not chunked:
    if options.budget is not None and options.budget < max_model_len:
      why = f"policy={options.policy}" if whole else "chunked_prefill off"
      raise ValueError(
        f"budget={options.budget}: with {why} a step must hold a whole prompt, so "
        f"it must be at least max_model_len={max_model_len}"
      )
    budget = max(budget, max_model_len)
  logging.info(
    "Token budget %d a step, %d seats, chunked prefill %s", budget, limits.max_num_seqs,
    "on" if chunked else "off",
  )  # fmt: skip
  return dataclasses.replace(
    options,
    prefix_cache=_may_share(options, model),
    budget=budget,
    max_num_seqs=limits.max_num_seqs,
    max_model_len=max_model_len,
    chunked_prefill=chunked,
    long_prefill_token_threshold=threshold,
  )


def _may_share(options: StartOptions, model: ModelConfig) -> bool:
  """Whether there will be a prefix cache; says why not where one was asked for."""
  lacks = sched.find_policy(options.policy).no_prefix_cache
  if options.prefix_cache and lacks:
    logging.info("Prefix cache off: policy %s, %s", options.policy, lacks)
  return options.prefix_cache and not lacks and not model.is_encoder_decoder


def _engine_config(
  options: StartOptions,
  checkpoint: Checkpoint,
  draft: drafting.Loaded | None,
  choice: attention.Choice,
  graphdef: nnx.GraphDef,
  shapes: Shapes,
  where: devices.Devices,
  store: ExecutableStore,
) -> EngineConfig:
  budget, seats, length = options.budget, options.max_num_seqs, options.max_model_len
  assert budget and seats and length, "_resolve fills them in"
  # Unchunked runs need a bucket for a whole sequence: `other_budgets` of 0 stand for that length.
  others = tuple(other or length for other in options.other_budgets)
  buckets = _buckets(options, budget, others)

  def sized(num_pages: int) -> EngineConfig:
    scheduler = SchedulerConfig(
      cache=CacheConfig(num_pages=num_pages, page_size=options.page_size),
      max_num_seqs=seats,
      max_requests=seats * (1 + _WAITING_PER_SEAT),
      max_budget=buckets[-1],
      max_model_len=length,
      ordering=options.ordering,
      policy=options.policy,
      prefix_cache=options.prefix_cache,
      max_drafts=options.speculate.k if options.speculate else 0,
    )
    config = EngineConfig(
      model=checkpoint.config.for_context(length),
      scheduler=scheduler,
      dtype=options.dtype,
      quantize=options.quantize,
      kv_dtype=options.kv_dtype,
      token_buckets=buckets,
      eos_token_ids=checkpoint.eos_token_ids,
      other_policies=options.other_policies,
      score_prompts=options.score_prompts,
      speculate=options.speculate,
      decode_steps=options.decode_steps,
      draft_model=draft.config if draft else None,
    )
    return choice.applied(config)

  tokens, fraction = options.kv_cache_tokens, options.memory_fraction
  if tokens is None and fraction is None:
    on_cpu = where.model.platform == "cpu"
    tokens = max(defaults.CPU_KV_CACHE_TOKENS, length) if on_cpu else None
    fraction = defaults.ACCELERATOR_MEMORY_FRACTION
  if tokens is not None:
    return sized(_pages(tokens, options, "kv_cache_tokens", tokens))
  weights = (*shapes, *(draft.weights.leaves if draft else ()))
  probe = sized(_PROBE_PAGES)
  tokens = _tokens_that_fit(probe, fraction, graphdef, shapes, weights, where, store)
  return sized(_pages(tokens, options, "memory_fraction", fraction))


def _buckets(options: StartOptions, budget: int, others: tuple[int, ...]) -> tuple[int, ...]:
  """The bucket table: the user's own, if there is one, and every budget."""
  own = options.token_buckets
  if own is None:
    return token_buckets(budget, others=others)
  if "bucket_shaped" in (options.policy, *options.other_policies):
    raise ValueError("token_buckets: policy bucket_shaped cuts steps to the default ones; drop one")
  if not all(1 <= bucket <= max(budget, *others, 0) for bucket in own):
    raise ValueError(
      f"token_buckets={own}: must be between 1 and the budget of {max(budget, *others, 0)}"
    )
  return tuple(sorted({*own, budget, *others}))


def _pages(tokens: int, options: StartOptions, field: str, value: object) -> int:
  """Whole pages in a pool of `tokens`."""
  pages = tokens // options.page_size
  if pages < 1:
    raise ValueError(
      f"{field}={value}: leaves room for {max(tokens, 0)} tokens of KV, less than one page of "
      f"{options.page_size}; raise it, or lower budget or max_model_len"
    )
  return pages


def _tokens_that_fit(
  probe: EngineConfig,
  fraction: float | None,
  graphdef: nnx.GraphDef,
  shapes: Shapes,
  weights: Shapes,
  where: devices.Devices,
  store: ExecutableStore,
) -> int:
  """Tokens in a pool of: fraction of memory - weights - the largest executable's scratch.

  The scratch does not grow with the pool, so it is measured on an executable with a tiny one.
  """
  if fraction is None or not 0 < fraction <= 1:
    raise ValueError(f"memory_fraction={fraction}: must be in (0, 1]")
  attention.register(probe, store.kernels)
  largest = next(iter(programs.model_programs(probe, graphdef, shapes, where)))
  report = compiler.compile_all([largest], store=store).reports[0]
  taken = sum(leaf.size * leaf.dtype.itemsize for leaf in weights) + report.temp_bytes
  room = fraction * defaults.memory_bytes(where.model) - taken
  return int(room // kv_bytes_per_token(probe))


def kv_bytes_per_token(config: EngineConfig) -> int:
  """Bytes of keys and values that one token takes in the pool, and in that of a draft model."""

  def of(model: ModelConfig, kv_dtype: KVDtype) -> int:
    wide = jnp.dtype(config.dtype).itemsize
    head = model.head_dim * wide if kv_dtype == "auto" else model.head_dim + 4  # and a scale
    return 2 * model.num_layers * model.num_kv_heads * head

  return of(config.model, config.kv_dtype) + (
    of(config.draft_model, "auto") if config.draft_model else 0
  )


def summary(started: Started) -> list[str]:
  """What somebody who starts a server wants to read, a line each."""
  engine, options = started.engine, started.options
  config, reports = engine.config.scheduler, engine.compile_reports
  cached = sum(report.cache_hit for report in reports)
  slots = config.cache.num_slots
  weights = options.dtype if options.quantize == "none" else options.quantize
  lines = [
    f"Model {started.checkpoint.name}: {started.weight_bytes / 1e6:,.0f} MB of {weights} "
    f"weights, loaded in {started.load_s:.1f} s",
    f"KV pool: {slots:,} tokens in {config.cache.num_pages:,} pages of {config.cache.page_size} "
    f"({engine.kv_bytes / 1e6:,.0f} MB), {slots / config.max_model_len:.1f} requests of "
    f"{config.max_model_len:,} tokens, prefix cache {'on' if config.prefix_cache else 'off'}",
    f"Buckets: {', '.join(map(str, engine.config.buckets))}",
    f"{len(reports)} executables in {started.compile_s:.1f} s ({cached} from the cache)",
  ]
  for report in sorted(reports, key=lambda r: str(r.key)):
    lines.append(
      f"  {' '.join(map(str, report.key)):14} trace {report.trace_s:5.2f} s  "
      f"{'cached  ' if report.cache_hit else 'compiled'} {report.compile_s:5.2f} s  "
      f"temp {report.temp_bytes / 1e6:8.1f} MB  in place {report.alias_bytes / 1e6:8.1f} MB"
    )
  return lines
