r"""Serve a Llama under a token budget and show what chunked prefill does.

  python -m jaxserve.main --budget 1536

loads a small chat model, compiles one executable per token bucket, runs streams of short chats
while one long prompt arrives, once with its prefill cut into chunks and once whole, prints both
side by side and writes report.html, result.json and steps.jsonl. The last line of stdout is one
JSON document.

  python -m jaxserve.main --mode=generate --prompt="Why is the sky blue?"

answers one prompt.

  python -m jaxserve.main --mode=serve --port 8000

is an OpenAI-compatible server (extra: serve).

  python -m jaxserve.main --mode=convert --model SRC --out DST

writes a checkpoint in the native format: verified, and nothing is left to dequantize.
"""

import gc
import json
import os
import pathlib
import secrets
import sys
import time
from typing import Any

from absl import app, flags, logging

from jaxserve import flag_values

_START = time.perf_counter()

FLAGS = flags.FLAGS
_MODE = flags.DEFINE_enum(
  "mode",
  "replay",
  ["replay", "generate", "serve", "convert"],
  "replay: the experiment; generate: answer --prompt; serve: a server; convert: --model to --out.",
)
_MODEL = flags.DEFINE_string(
  "model",
  "smollm2-135m",
  "smollm2-135m, random (a tiny random Llama), a .gguf file, a checkpoint directory, or a hub id.",
)
_BUDGET = flags.DEFINE_integer(
  "budget", None, "Most tokens computed in one step. Default by device.", lower_bound=1
)
_ITL_SLO_MS = flags.DEFINE_float(
  "itl_slo_ms",
  None,
  "Instead of --budget: the longest gap between two tokens of a stream; the budget is solved for "
  "it on the device in use.",
)
_ITL_SLO_CONTEXT = flags.DEFINE_integer(
  "itl_slo_context",
  None,
  "Tokens cached by each decoding request in the load that --itl_slo_ms is kept for. Default: 512 "
  "on a CPU, else 2048.",
  lower_bound=0,
)
_PROFILE = flags.DEFINE_string(
  "profile",
  None,
  "Step costs that `python -m experiments.calibrate` measured for this model on this machine; used "
  "by --itl_slo_ms and --policy=slo_aware.",
)
_TOKEN_BUCKETS = flags.DEFINE_list(
  "token_buckets",
  None,
  "Token counts to compile steps for, beside the budget: 1,8,64,...; `python -m "
  "experiments.buckets` finds those that pad a load least. Default: by budget.",
)
_MAX_NUM_SEQS = flags.DEFINE_integer(
  "max_num_seqs", None, "Most requests running at once. Default by device.", lower_bound=1
)
_THRESHOLD = flags.DEFINE_integer(
  "long_prefill_token_threshold",
  0,
  "Most tokens of one request in a step; 0 = no cap.",
  lower_bound=0,
)
_CHUNKED = flags.DEFINE_bool("chunked_prefill", True, "Split prompts over steps.")
_MAX_MODEL_LEN = flags.DEFINE_integer(
  "max_model_len", None, "Most tokens of one request. Default: the model's.", lower_bound=2
)
_PAGE_SIZE = flags.DEFINE_integer("page_size", 64, "Tokens in a KV page.", lower_bound=1)
_KV_TOKENS = flags.DEFINE_integer(
  "kv_cache_tokens", None, "Tokens that the KV pool holds. Default on a CPU: 32768.", lower_bound=1
)
_MEMORY = flags.DEFINE_float(
  "memory_fraction",
  None,
  "Share of memory for weights, scratch and KV pool. Default on an accelerator: 0.9.",
)
_DTYPE = flags.DEFINE_enum(
  "dtype", "bfloat16", ["bfloat16", "float32"], "Of weights, products and KV pages."
)
_QUANTIZE = flags.DEFINE_enum(
  "quantize", "none", ["none", "int8", "int4"], "How the matrices of the layers are stored."
)
_ATTENTION = flags.DEFINE_enum(
  "attention_backend",
  "auto",
  ["auto", "xla", "ref", "numba", "mosaic_gpu"],
  "Implementation of attention. auto: mosaic_gpu on a GPU that it supports, numba (extra cpu) on a "
  "CPU, else xla.",
)
_ORDERING = flags.DEFINE_enum(
  "ordering", "fcfs", ["fcfs", "priority"], "First come first served, or by priority."
)
_POLICY = flags.DEFINE_string(
  "policy", "vllm_v1", "Scheduling policy; an unknown name lists what exists."
)
_POLICY_ARGS = flags.DEFINE_list("policy_args", [], "Hyper-parameters of --policy: key=value,...")
_COMPARE = flags.DEFINE_list(
  "compare", [], "In --mode=replay: policies to run side by side on the same load."
)
_PREFIX = flags.DEFINE_bool(
  "prefix_cache", True, "Requests that begin alike share what is computed of them."
)
_SALT_SEED = flags.DEFINE_integer(
  "cache_salt_seed",
  None,
  "Salt of page digests: processes of one seed agree on them. Default: random.",
  lower_bound=0,
  upper_bound=2**128 - 1,
)
_SPECULATE = flags.DEFINE_string(
  "speculate",
  None,
  "Speculative decoding: ngram:k=4 takes drafts from the request's own text, draft:MODEL,k=4 asks "
  "a smaller model with the same vocabulary. Default: off.",
)
_KV_DTYPE = flags.DEFINE_enum(
  "kv_cache_dtype", "auto", ["auto", "int8"], "Of KV; auto: as --dtype."
)
_DECODE_STEPS = flags.DEFINE_integer(
  "decode_steps", 1, "Most steps of decodes that the device runs by itself; outputs come in bursts."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of sampling.", lower_bound=0)
_PROMPT = flags.DEFINE_string("prompt", None, "What to answer in --mode=generate.")
_MAX_TOKENS = flags.DEFINE_integer(
  "max_tokens", 128, "Most tokens of the answer in --mode=generate.", lower_bound=1
)
_TEMPERATURE = flags.DEFINE_float(
  "temperature", 0.0, "Of the answer in --mode=generate; 0 = greedy.", lower_bound=0.0
)
_HOST = flags.DEFINE_string(
  "host", "127.0.0.1", "Address to bind in --mode=serve; 0.0.0.0 lets other machines in."
)
_PORT = flags.DEFINE_integer(
  "port", 8000, "Port of --mode=serve; 0 = any free one.", lower_bound=0, upper_bound=65535
)
_API_KEY = flags.DEFINE_string(
  "api_key",
  None,
  "Bearer token that clients of --mode=serve must send. Default: the environment variable "
  "JAXSERVE_API_KEY, which other users of the machine cannot read; without either, none.",
)
_SERVED_NAME = flags.DEFINE_string(
  "served_model_name", None, "What clients call the model. Default: --model, or a path's own name."
)
_MAX_QUEUE = flags.DEFINE_integer(
  "max_queue",
  256,
  "Most sequences that wait besides the running ones in --mode=serve; more get a 429.",
  lower_bound=0,
)
_MAX_BODY_MB = flags.DEFINE_float(
  "max_body_mb", 16.0, "Largest body of a request in --mode=serve.", lower_bound=0.001
)
_TIMEOUT_S = flags.DEFINE_float(
  "request_timeout_s",
  None,
  "Most that a request may take in --mode=serve, waiting included. Default: any time.",
  lower_bound=0.001,
)
_METRICS_ALIAS = flags.DEFINE_enum(
  "metrics_alias", None, ["vllm"], "In --mode=serve, /metrics has the names of that server too."
)
_DRAIN_S = flags.DEFINE_float(
  "drain_s", 30.0, "Time that running requests have after SIGTERM in --mode=serve.", lower_bound=0.0
)
_OUT = flags.DEFINE_string("out", None, "Where results, or what is converted, go: runs/<time>.")
_CACHE_DIR = flags.DEFINE_string(
  "cache_dir", "~/.cache/jaxserve", "Converted models and compiled executables."
)


flags.register_validator(
  "itl_slo_ms",
  lambda x: x is None or 0 < x < float("inf"),
  message="must be a positive number of milliseconds",
)
flags.register_multi_flags_validator(
  ["itl_slo_ms", "budget"],
  lambda f: f["itl_slo_ms"] is None or f["budget"] is None,
  message="give --itl_slo_ms or --budget, not both: the budget is solved for the target",
)
flags.register_multi_flags_validator(
  ["itl_slo_ms", "chunked_prefill"],
  lambda f: f["itl_slo_ms"] is None or f["chunked_prefill"],
  message="--itl_slo_ms needs chunked prefill: leave out --nochunked_prefill",
)
flags.register_multi_flags_validator(
  ["itl_slo_ms", "itl_slo_context"],
  lambda f: f["itl_slo_ms"] is not None or f["itl_slo_context"] is None,
  message="--itl_slo_context is the load of --itl_slo_ms: give that too",
)
flags.register_multi_flags_validator(
  ["budget", "max_num_seqs"],
  lambda f: f["budget"] is None or f["max_num_seqs"] is None or f["budget"] >= f["max_num_seqs"],
  message="--budget must be at least --max_num_seqs: every decoding request takes one token a "
  "step; raise --budget or lower --max_num_seqs",
)
flags.register_multi_flags_validator(
  ["budget", "max_model_len", "chunked_prefill"],
  flag_values.holds_whole_prompts,
  message="with --nochunked_prefill a step must hold a whole prompt: --budget must be at least "
  "--max_model_len",
)  # fmt: skip
flags.register_multi_flags_validator(
  ["long_prefill_token_threshold", "max_model_len"],
  flag_values.caps_within_length,
  message="--long_prefill_token_threshold must be at most --max_model_len; 0 turns it off",
)  # fmt: skip
flags.register_multi_flags_validator(
  ["mode", "prompt"],
  lambda f: f["mode"] != "generate" or f["prompt"] is not None,
  message='--mode=generate needs --prompt="..."',
)
flags.register_multi_flags_validator(
  ["mode", "out"],
  lambda f: f["mode"] != "convert" or f["out"] is not None,
  message="--mode=convert needs --out=DIRECTORY",
)
flags.register_multi_flags_validator(
  ["kv_cache_tokens", "memory_fraction"],
  lambda f: f["kv_cache_tokens"] is None or f["memory_fraction"] is None,
  message="give --kv_cache_tokens or --memory_fraction, not both",
)
flags.register_validator(
  "policy_args",
  flag_values.are_pairs,
  message="must be key=value,... with numbers",
)
flags.register_validator(
  "token_buckets",
  flag_values.are_counts,
  message="must be positive numbers: 1,8,64,...",
)
flags.register_validator(
  "compare",
  lambda names: len(set(names)) == len(names),
  message="must name each policy once",
)
flags.register_validator(
  "memory_fraction", lambda x: x is None or 0 < x <= 1, message="must be in (0, 1]"
)


def main(argv: list[str]) -> int:
  """Runs what the flags say; 0 on success, 2 for a mistake of the user."""
  if len(argv) > 1:
    print(f"unexpected arguments {argv[1:]}: everything is a --flag", file=sys.stderr)
    return 2
  logging.set_verbosity(logging.INFO)
  logging.set_stderrthreshold("info")
  try:
    return _MODES[_MODE.value]()
  except (ValueError, NotImplementedError) as error:
    print(f"jaxserve: {error}", file=sys.stderr)
    return 2


def run() -> None:
  """The console script."""
  app.run(main, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
  """As absl parses them, but exit code 2 for a mistake and 0 for --help."""
  if "--help" in argv:
    print(f"{__doc__}\n{FLAGS.module_help(FLAGS.find_module_defining_flag('budget'))}")
    sys.exit(0)
  try:
    return FLAGS(argv)
  except flags.Error as error:
    print(f"jaxserve: {error}\nSee --help.", file=sys.stderr)
    sys.exit(2)


def _cache_dir() -> pathlib.Path:
  return pathlib.Path(_CACHE_DIR.value).expanduser()


def _profile() -> Any:
  """The profile that --profile names, or None; ValueError if it is none."""
  if _PROFILE.value is None:
    return None
  from jaxserve.engine import profiles

  return profiles.load(_PROFILE.value)


def _solve_budget(model: Any, device: Any, load: Any) -> int:
  """The budget that keeps --itl_slo_ms."""
  from jaxserve import latency_target

  assert _ITL_SLO_MS.value, "without a target nobody asks"
  return latency_target.solve_budget(
    model, device, load, itl_ms=_ITL_SLO_MS.value, context=_ITL_SLO_CONTEXT.value,
    dtype=_DTYPE.value, profile=_profile(),
  )  # fmt: skip


def _policy_args() -> dict[str, float]:
  """--policy_args; for slo_aware what they leave out is taken from --profile."""
  given = flag_values.numbers(_POLICY_ARGS.value)
  profile = _profile()
  if profile is None or _POLICY.value != "slo_aware":
    return given
  from jaxserve import latency_target

  return latency_target.slo_aware_args(given, profile)


def _start(replay: bool) -> tuple[Any, dict[str, Any]]:
  """Starts the engine; how long each phase took."""
  begin = time.perf_counter()
  gc.disable()  # a tenth of the imports; `startup.start` collects what there is
  from jaxserve.engine import devices, speculation, startup

  devices.set_up()
  import_s = time.perf_counter() - begin
  options: dict[str, Any] = dict(
    model=_MODEL.value,
    cache_dir=_cache_dir(),
    dtype=_DTYPE.value,
    quantize=_QUANTIZE.value,
    kv_dtype=_KV_DTYPE.value,
    budget=_BUDGET.value,
    solve_budget=None if _ITL_SLO_MS.value is None else _solve_budget,
    other_budgets=(0,) if replay else (),
    token_buckets=tuple(map(int, _TOKEN_BUCKETS.value)) if _TOKEN_BUCKETS.value else None,
    max_num_seqs=_MAX_NUM_SEQS.value,
    long_prefill_token_threshold=_THRESHOLD.value,
    chunked_prefill=_CHUNKED.value,
    max_model_len=_MAX_MODEL_LEN.value,
    page_size=_PAGE_SIZE.value,
    kv_cache_tokens=_KV_TOKENS.value,
    memory_fraction=_MEMORY.value,
    ordering=_ORDERING.value,
    policy=_POLICY.value,
    policy_args=_policy_args(),
    other_policies=tuple(_COMPARE.value) if replay else (),
    attention=_ATTENTION.value,
    speculate=speculation.parse(_SPECULATE.value) if _SPECULATE.value else None,
    decode_steps=_DECODE_STEPS.value,
    seed=_SEED.value,
    prefix_cache=_PREFIX.value,
    cache_salt=(
      secrets.token_bytes(16) if _SALT_SEED.value is None else _SALT_SEED.value.to_bytes(16, "big")
    ),
    score_prompts=_MODE.value == "serve",
  )
  started = startup.start(startup.StartOptions(**options))
  gc.enable()
  if (profile := _profile()) is not None:
    from jaxserve.engine import profiles

    profiles.check_model(profile, started.checkpoint.config, _DTYPE.value)
  for line in startup.summary(started):
    logging.info("%s", line)
  times = {
    "import_s": round(import_s, 2),
    "load_s": round(started.load_s, 2),
    "compile_s": round(started.compile_s, 2),
    "first_step_s": None,
    "buckets": len(started.engine.config.buckets),
  }
  return started, times


def _tokenizer(started: Any) -> Any:
  from jaxserve.text.tokenizer import load_tokenizer

  checkpoint = started.checkpoint
  return load_tokenizer(
    checkpoint.tokenizer_json, checkpoint.eos_token_ids, checkpoint.bos_token_id
  )


def _replay() -> int:
  started, times = _start(replay=True)
  from jaxserve import cost
  from jaxserve.engine import defaults
  from jaxserve.replay import experiment

  def first_step() -> None:
    times["first_step_s"] = round(time.perf_counter() - _START, 2)

  result = experiment.run_experiment(
    started, _tokenizer(started), defaults.describe_hardware(), times, compare=_COMPARE.value,
    on_first_step=first_step,
  )  # fmt: skip
  out = pathlib.Path(_OUT.value or time.strftime("runs/%Y%m%d-%H%M%S"))
  experiment.write(result, out, title=f"One long prompt among short chats: {_MODEL.value}")
  print(experiment.table(result))
  print()
  print(cost.describe(started.options.budget))
  print(f"\n{next(iter(result.texts))}: {next(iter(result.texts.values()))!r}")
  print(f"Wrote {out / 'report.html'}, result.json and steps.jsonl")
  print(json.dumps(result.document, separators=(",", ":")))
  return 0


def _generate() -> int:
  started, times = _start(replay=False)
  from jaxserve.engine import SamplingParams
  from jaxserve.text.chat import render_chat

  tokenizer = _tokenizer(started)
  message = {"role": "user", "content": _PROMPT.value}
  text = render_chat(started.checkpoint.chat_template, [message])
  sampling = SamplingParams(max_tokens=_MAX_TOKENS.value, temperature=_TEMPERATURE.value)
  prompt = tokenizer.encode(text, add_special_tokens=False)
  (done,) = started.engine.generate([prompt], sampling)
  answer = tokenizer.decode(done.tokens)
  print(answer)
  document = {
    "model": started.checkpoint.name,
    "retraces": started.engine.retraces,
    "startup": times,
    "prompt_tokens": len(prompt),
    "completion_tokens": len(done.tokens),
    "finish_reason": done.finish_reason,
    "text": answer,
  }
  print(json.dumps(document, separators=(",", ":")))
  return 0


def _serve() -> int:
  try:
    from jaxserve import server
  except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package in ("", "jaxserve"):
      raise
    raise ValueError(
      f"--mode=serve needs the package {package}, which is not installed; run: "
      f"{sys.executable} -m pip install 'jaxserve[serve]'"
    ) from None
  options = server.ServerOptions(
    host=_HOST.value,
    port=_PORT.value,
    api_key=_API_KEY.value or os.environ.get("JAXSERVE_API_KEY") or None,
    max_queue=_MAX_QUEUE.value,
    max_body_bytes=int(_MAX_BODY_MB.value * (1 << 20)),
    vllm_names=_METRICS_ALIAS.value == "vllm",
    timeout_s=_TIMEOUT_S.value,
    drain_s=_DRAIN_S.value,
  )
  sock = server.listen(options)  # before the long part
  with server.answering(sock):
    started, _ = _start(replay=False)
    started.engine.warm_up(int(started.engine.params.budget))
  is_path = pathlib.Path(_MODEL.value).expanduser().exists()
  name = started.checkpoint.name if is_path else _MODEL.value
  served = server.Served(
    engine=started.engine,
    tokenizer=_tokenizer(started),
    chat_template=started.checkpoint.chat_template,
    name=_SERVED_NAME.value or name,
  )
  server.serve(served, options, sock)
  return 0


def _convert() -> int:
  begin = time.perf_counter()
  from jaxserve.model import source

  document = source.convert(_MODEL.value, pathlib.Path(_OUT.value or ""), _cache_dir())
  print(f"Wrote {_OUT.value}; start it with --model={_OUT.value}")
  document["seconds"] = round(time.perf_counter() - begin, 2)
  print(json.dumps(document, separators=(",", ":")))
  return 0


_MODES = {"replay": _replay, "generate": _generate, "serve": _serve, "convert": _convert}

if __name__ == "__main__":
  run()
