"""The format of SGLang, Sarathi-Serve and its baselines: prefills and decodes of each step.

`adapt` turns a scenario's policy and configuration into a policy of jaxserve, `_Run.view` reads the
expected fields out of (state, decision). One step is schedule, then commit. Fields that a step does
not name are not expected. 'x*n' stands for n requests of the family x.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.vectors import families, policies
from experiments.vectors.driver import Driver, Step
from experiments.vectors.outcome import Differs, Unsupported, equal, known_fields
from jaxserve import sched
from jaxserve.config import SchedulerConfig
from jaxserve.types import SchedulerParams

SCENARIO = (
  "name", "policy", "config", "requests", "steps", "why", "expected", "source", "note",
)  # fmt: skip
REQUEST_FIELDS = ("id", "count", "prompt", "max_new", "stop_at", "arrive", "out")
LISTS = ("decode", "finished", "preempted", "retracted", "ignored", "running", "waiting")
NUMBERS = ("tokens", "free_tokens")
OF_POLICY = ("batch_is_full", "new_token_ratio")  # fields of the policy's own state
EXPECTED = ("step", "prefill", "chunked_req", *LISTS, *NUMBERS, *OF_POLICY)

# Name there -> name in jaxserve.
POLICY_NAMES = {
  "vllm": "prefill_first",  # vLLM V0
  "vllm_v0": "prefill_first",
  "faster_transformer": "static",
  "fastertransformer": "static",
  "simple": "simple_chunking",
}
SHARED_CONFIG = ("max_model_len", "max_num_seqs", "max_running_requests", "reserve")
PAGED_CONFIG = (*SHARED_CONFIG, "block_size", "num_blocks", "watermark")
SGLANG_ARGUMENTS = (
  "chunked_prefill_size", "max_prefill_tokens", "legacy_rem_input_gate", "prefill_decode_interval",
  "schedule_conservativeness", "init_new_token_ratio", "retract_decode_steps", "page_overhead",
  "clip_max_new_tokens", "min_new_token_ratio_factor", "new_token_ratio_decay_steps",
)  # fmt: skip
CONFIG_FIELDS = {
  "sglang": (
    *SHARED_CONFIG, "page_size", "pool_tokens", "enable_mixed_chunk", *SGLANG_ARGUMENTS
  ),
  "sarathi": (*PAGED_CONFIG, "chunk_size", "dynamic"),
  "simple_chunking": (*PAGED_CONFIG, "chunk_size"),
  "orca": PAGED_CONFIG,
  "static": PAGED_CONFIG,
  "prefill_first": (*PAGED_CONFIG, "max_batched_tokens"),
  "vllm_v1": (*PAGED_CONFIG, "chunk_size", "max_batched_tokens", "threshold"),
}  # fmt: skip
LACKING_CONFIG = {
  "radix_cache": "prefix cache",
  "overlap": "overlapped schedule of SGLang",
  "speculative": "speculative drafts",
  "ignore_eos": "admission with ignore_eos",
}


@dataclasses.dataclass(frozen=True)
class Request:
  """One request, members of a family one by one."""

  id: str
  prompt: int
  max_new: int
  stop_at: int | None
  arrive: int
  out: int


@dataclasses.dataclass(frozen=True)
class Adapted:
  """A scenario in jaxserve's terms.

  policy: name in jaxserve.
  arguments: of the policy, by their upstream names.
  numbers: fields of SchedulerParams.
  shape: arguments of `policies.make`.
  """

  policy: str
  arguments: Mapping[str, Any]
  numbers: Mapping[str, int]
  shape: Mapping[str, Any]

  def make(self) -> tuple[SchedulerConfig, SchedulerParams]:
    return policies.make(self.policy, self.arguments, self.numbers, **self.shape)


def parse_requests(records: Sequence[Mapping[str, Any]]) -> tuple[list[Request], dict[str, str]]:
  """Requests in order, and the family of each member."""
  requests, family = [], {}
  for record in records:
    known_fields(record, REQUEST_FIELDS, {}, "request")
    name = str(record["id"])
    members = [f"{name}{i}" for i in range(record["count"])] if "count" in record else [name]
    for member in members:
      family[member] = name
      requests.append(
        Request(
          id=member,
          prompt=record["prompt"],
          max_new=record["max_new"],
          stop_at=record.get("stop_at"),
          arrive=record.get("arrive", 0),
          out=record.get("out", 0),
        )
      )
  return requests, family


def _budget(policy: str, config: Mapping[str, Any], everything: int, max_model_len: int) -> int:
  """Tokens of one step; SGLang's sizes are arguments of its policy, so the budget is ample."""
  if "dynamic" in config:
    return int(config["dynamic"]["high"])
  if "chunk_size" in config:
    return int(config["chunk_size"])
  if policy in ("prefill_first", "vllm_v1"):
    return int(config.get("max_batched_tokens", max_model_len))
  return everything


def adapt(name: str, config: Mapping[str, Any], requests: Sequence[Request]) -> Adapted:
  """The policy, its arguments and a configuration large enough for all requests.

  Where the scenario names no size, memory, seats and context are ample.
  """
  if name == "sglang_mixed":
    name, config = "sglang", {"enable_mixed_chunk": True, **config}
  policy = POLICY_NAMES.get(name, name)
  if policy not in CONFIG_FIELDS:
    raise Unsupported(f"no policy {name} yet")
  known_fields(config, CONFIG_FIELDS[policy], LACKING_CONFIG, "config")
  arguments = {k: config[k] for k in (*SGLANG_ARGUMENTS, "dynamic") if k in config}
  if arguments.get("chunked_prefill_size", 0) is None:
    arguments["chunked_prefill_size"] = -1
  longest = max(r.prompt + r.max_new for r in requests)
  max_model_len = config.get("max_model_len", 1 << longest.bit_length())
  page_size = config.get("page_size", config.get("block_size", 16))
  everything = sum(r.prompt + r.max_new for r in requests) + len(requests)
  seats = config.get("max_running_requests", config.get("max_num_seqs", len(requests)))
  if policy == "sglang":
    policy = "sglang_mixed" if config.get("enable_mixed_chunk") else "sglang"
    # It bills whole pages and reserves one more, and counts the request in the chunk slot twice.
    everything += max(0, config.get("chunked_prefill_size") or 0) + len(requests) * page_size
    longest += 3 * page_size
    if "max_running_requests" not in config and "max_num_seqs" not in config:
      seats = 2 * len(requests)
  whole = policy in ("orca", "static")  # they reserve max_model_len for each request
  ample = len(requests) * (max_model_len if whole else longest) * 2 // page_size + 64
  pages = config.get("num_blocks", config.get("pool_tokens", ample * page_size) // page_size)
  budget = _budget(policy, config, everything, max_model_len)
  numbers = {"budget": budget, "max_num_seqs": seats}
  if "threshold" in config:
    numbers["long_prefill_token_threshold"] = config["threshold"]
  if "block_size" in config or "watermark" in config:  # the paged block manager's 1 % by default
    numbers["watermark_pages"] = int(config.get("watermark", 0.01) * pages)
  shape = dict(
    num_pages=pages,
    page_size=page_size,
    num_requests=len(requests),
    max_budget=max(budget, len(requests)),
    max_model_len=max_model_len,
    chunked_prefill=policy not in ("prefill_first", "orca", "static"),
    reserve=config.get("reserve", "gate"),
  )
  return Adapted(policy, arguments, numbers, shape)


def run(scenario: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Compares every expected field of every step.

  Raises:
    Differs: at the first field that is not equal.
    Unsupported: see `outcome`.
  """
  del defaults
  known_fields(scenario, SCENARIO, {}, "scenario")
  steps = {record["step"]: record for record in scenario["expected"]}
  for number, record in steps.items():
    known_fields(record, EXPECTED, {}, f"step {number}")
  requests, family = parse_requests(scenario["requests"])
  adapted = adapt(scenario["policy"], scenario["config"], requests)
  try:
    _compare_steps(_Run(adapted, requests), scenario, steps, family)
  except Differs as difference:
    why = _deliberate(adapted, requests)
    if why:
      raise Unsupported(f"deliberate: {why}; {difference}") from difference
    raise


def _compare_steps(
  loop: "_Run", scenario: Mapping[str, Any], steps: Mapping[int, Mapping[str, Any]],
  family: Mapping[str, str],
) -> None:  # fmt: skip
  for number in range(max([*steps, scenario.get("steps", 1) - 1]) + 1):
    seen = loop.step(number)
    for field, expected in steps.get(number, {}).items():
      if field != "step":
        _compare(f"step {number} {field}", field, seen, expected, family)


def _deliberate(adapted: Adapted, requests: Sequence[Request]) -> str:
  """Why SGLang and jaxserve must differ on these requests, "" if they need not."""
  if not adapted.policy.startswith("sglang"):
    return ""
  page_size = adapted.shape["page_size"]
  pool, arguments = adapted.shape["num_pages"] * page_size, adapted.arguments
  page = page_size if arguments.get("page_overhead", True) else 0
  clip = arguments.get("clip_max_new_tokens", 4096)
  for r in requests:
    if r.prompt + r.max_new - 1 > pool:
      return f"request {r.id} may need {r.prompt + r.max_new - 1} slots of {pool}: it is refused"
    wanted = r.prompt + min(r.max_new, clip) + page
    if wanted >= pool:
      return f"request {r.id} waits for {wanted} of {pool} tokens for ever there: it runs alone"
  return ""


def _compare(
  where: str, field: str, seen: Mapping[str, Any], expected: Any, family: Mapping[str, str]
) -> None:
  if field == "prefill":
    families.match_prefills(where, seen[field], expected, family)
  elif field in LISTS:
    families.match_names(where, seen[field], expected, family)
  elif field in OF_POLICY and field not in seen:
    raise Unsupported(f"the policy's state has no {field}")
  else:
    equal(where, seen[field], expected)


class _Run:
  """One run of a scenario."""

  def __init__(self, adapted: Adapted, requests: Sequence[Request]):
    self.requests = {r.id: r for r in requests}
    self.config, self.params = adapted.make()
    self.budget = adapted.numbers["budget"]
    self.whole_prompts = not adapted.shape["chunked_prefill"]
    self.policy = adapted.policy
    self.driver = Driver(self.config, self.params)

  def step(self, number: int) -> dict[str, Any]:
    arrivals = [r for r in self.requests.values() if r.arrive == number]
    # Running requests stand before waiting ones in the queue.
    ignored = [r.id for r in sorted(arrivals, key=lambda r: not r.out) if not self._submit(r)]
    step = self.driver.schedule()
    seen = self.view(step)
    outputs = {name: self.driver.outputs[name] + 1 for name in self.driver.yields(step)}
    stopped = [name for name, n in outputs.items() if n == self.requests[name].stop_at]
    finished = self.driver.commit(step, stopped)
    chunked = seen["chunked_req"]
    if isinstance(chunked, str) and chunked in finished:
      seen["chunked_req"] = None
    return seen | {"finished": finished, "ignored": ignored}

  def _submit(self, r: Request) -> bool:
    """False: refused at submit, because it could never be served."""
    pool = self.config.cache.num_slots
    if r.prompt > pool:
      raise Unsupported(
        f"deliberate: request {r.id} of {r.prompt} tokens exceeds the pool of {pool} and is "
        f"refused at submit"
      )
    if self.policy == "prefill_first" and r.prompt > self.budget:
      return False
    limit = sched.request_limit(self.config, r.prompt, r.max_new)
    self.driver.submit(r.id, r.prompt, limit)
    if r.out:
      if self.driver.waiting() != [r.id]:
        raise Unsupported(f"request {r.id} starts as running behind a waiting one")
      self.driver.start(r.id, r.out)
    return True

  def view(self, step: Step) -> dict[str, Any]:
    """The expected fields, out of the decision and the state after it."""
    prefills = [name for name in step.order if name not in step.decoding]
    running = self.driver.running()
    chunked = [name for name in running if name not in self.driver.decoding]
    policy_state = getattr(self.driver.state, "policy", None)
    own = {f: getattr(policy_state, f) for f in OF_POLICY if hasattr(policy_state, f)}
    return {
      "prefill": [(name, step.start[name], step.tokens[name]) for name in prefills],
      "decode": [name for name in step.order if name in step.decoding],
      "tokens": int(step.decision.num_tokens),
      "chunked_req": chunked[0] if len(chunked) == 1 else chunked or None,
      "preempted": step.preempted,
      "retracted": step.preempted,
      "running": running,
      "waiting": self.driver.waiting(),
      "free_tokens": self.driver.free_pages() * self.config.cache.page_size,
    } | {field: _plain(value) for field, value in own.items()}


def _plain(value: Any) -> bool | float:
  number = value.item()
  return number if isinstance(number, bool) else float(number)
