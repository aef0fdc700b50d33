"""The vLLM format: configuration, requests, and what a step looks like there.

Mapping: block -> page, `num_blocks` counts one that is never handed out, `reserve_full_prompt` ->
reserve="gate" or "none", `chunking` -> chunked_prefill, `policy` -> ordering, `asynch` -> requests
may be scheduled with an output in flight (otherwise await_host). The watermark is taken of all
blocks, as there.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from experiments.vectors import policies
from experiments.vectors.driver import Driver, Step
from experiments.vectors.outcome import Unsupported, known_fields
from jaxserve import sched
from jaxserve.config import SchedulerConfig
from jaxserve.types import SchedulerParams

DEFAULTS = {
  "budget": 8192, "max_num_seqs": 16, "block_size": 16, "num_blocks": 10000, "threshold": 0,
  "chunking": True, "policy": "fcfs", "prefix_caching": False, "max_model_len": 2048,
  "reserve_full_prompt": True, "watermark": 0.0, "num_spec_tokens": 0, "lookahead": 0,
  "draft_slots_per_request": 0, "asynch": False,
}  # fmt: skip
DEFAULT_MAX_TOKENS = 16
_MAX_DRAFTS = 4  # at least, so that scenarios share compiled functions

LACKING_CONFIG = {
  "draft_slots_per_request": "deliberate: a draft model has steps of its own, so that drafting "
  "takes no slots of the budget",
  "lookahead": "deliberate: a draft model proposes as far as a request's pages reach, so that no "
  "slots are taken ahead",
  "drop_last_hit_block": "hits that leave out a page more, for drafters",
  "kv_connector": "KV connectors",
  "encoder_budget": "encoder inputs",
  "lora": "LoRA",
  "throttle": "throttled steps",
}
REQUEST_FIELDS = (
  "id", "arrival_step", "prompt_len", "max_tokens", "min_tokens", "priority", "arrival_time",
  "fill", "skip_prefix_read", "stop", "stop_token_ids", "eos", "eos_token_id", "ignore_eos",
  "stop_at",
)  # fmt: skip
LACKING_REQUEST = {
  "drafts": "speculative drafts",
  "blocked": "requests that wait for something external",
  "num_external_tokens": "KV connectors",
  "lora": "LoRA",
  "mm": "encoder inputs",
}


@dataclasses.dataclass(frozen=True)
class Request:
  """One request of a scenario; max_tokens None = up to max_model_len."""

  id: str
  step: int
  prompt: int
  max_tokens: int | None
  min_tokens: int
  priority: int
  time: float
  fill: int | None
  reads_prefix: bool
  stop_ids: frozenset[int]
  stop_at: int | None

  def ends(self, outputs: int, token: int | None) -> bool:
    """Whether the newest of `outputs` outputs stops the request, its length aside."""
    if outputs < self.min_tokens:
      return False
    return token in self.stop_ids or outputs == self.stop_at

  def key(self) -> tuple[int, float, str]:
    """Urgency under the priority policy: smaller first."""
    return self.priority, self.time, self.id


def _ids(value: Any) -> set[int]:
  if value is None:
    return set()
  return {value} if isinstance(value, int) else set(value)


def parse_request(record: Mapping[str, Any], step: int = 0) -> Request:
  known_fields(record, REQUEST_FIELDS, LACKING_REQUEST, "request")
  stops = _ids(record.get("stop")) | _ids(record.get("stop_token_ids"))
  if not record.get("ignore_eos"):
    stops |= _ids(record.get("eos")) | _ids(record.get("eos_token_id"))
  return Request(
    id=str(record["id"]),
    step=record.get("arrival_step", step),
    prompt=record["prompt_len"],
    max_tokens=record.get("max_tokens", DEFAULT_MAX_TOKENS),
    min_tokens=record.get("min_tokens", 0),
    priority=record.get("priority", 0),
    time=record.get("arrival_time", 0.0),
    fill=record.get("fill"),
    reads_prefix=not record.get("skip_prefix_read"),
    stop_ids=frozenset(stops),
    stop_at=record.get("stop_at"),
  )


def full_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
  """Defaults filled in; refuses what is not supported."""
  known_fields(
    config, [*DEFAULTS, "max_num_scheduled_tokens", "usable_blocks"], LACKING_CONFIG, "config"
  )
  merged = DEFAULTS | dict(defaults) | dict(config)
  if merged["policy"] not in ("fcfs", "priority"):
    raise Unsupported(f"no policy {merged['policy']} yet")
  return merged


def make(c: Mapping[str, Any], num_requests: int) -> tuple[SchedulerConfig, SchedulerParams]:
  """Configuration and parameters of a full config."""
  budget = c["budget"]
  if c.get("max_num_scheduled_tokens") is not None:
    budget = min(budget, c["max_num_scheduled_tokens"])
  numbers = dict(
    budget=budget,
    max_num_seqs=c["max_num_seqs"],
    long_prefill_token_threshold=c["threshold"],
    watermark_pages=int(c["watermark"] * c["num_blocks"]),
  )
  return policies.make(
    policies.DEFAULT,
    {},
    numbers,
    num_pages=c["num_blocks"] - 1,
    page_size=c["block_size"],
    num_requests=num_requests,
    max_budget=budget,
    chunked_prefill=c["chunking"],
    max_model_len=c["max_model_len"],
    ordering=c["policy"],
    reserve="gate" if c["reserve_full_prompt"] else "none",
    prefix_cache=c["prefix_caching"],
    recompute_last_page=c["prefix_caching"],
    max_drafts=max(c["num_spec_tokens"], _MAX_DRAFTS) if c["num_spec_tokens"] else 0,
  )


def refuse_unservable(c: Mapping[str, Any], requests: Sequence[Request]) -> None:
  """Requests that jaxserve refuses at submit and vLLM lets wait for ever."""
  slots = (c["num_blocks"] - 1) * c["block_size"]
  for r in requests:
    if r.prompt > slots:
      raise Unsupported(
        f"deliberate: request {r.id} of {r.prompt} tokens exceeds the pool of {slots} and is "
        f"refused at submit"
      )
    longest = min(r.prompt, c["threshold"] or r.prompt)
    if not c["chunking"] and longest > c["budget"]:
      raise Unsupported(
        f"deliberate: request {r.id} of {r.prompt} tokens exceeds the budget {c['budget']} without "
        f"chunking and is refused at submit"
      )


def submit_all(driver: Driver, c: Mapping[str, Any], arrivals: Sequence[Request]) -> None:
  """Submits requests that arrive together: in list order, or by time under priority."""
  priority = c["policy"] == "priority"
  for r in sorted(arrivals, key=lambda r: (r.time, r.id)) if priority else arrivals:
    limit = sched.request_limit(driver.config, r.prompt, r.max_tokens)
    urgency = r.priority if priority else 0
    driver.submit(
      r.id, r.prompt, limit, priority=urgency, await_host=not c["asynch"],
      prompt=() if r.fill is None else [r.fill] * r.prompt, reads_cache=r.reads_prefix,
    )  # fmt: skip


def urgency_ranks(c: Mapping[str, Any], requests: Sequence[Request]) -> list[Request]:
  """Requests as they are, or with the rank of their key as priority.

  jaxserve breaks ties by order of submission. Where a later submission has the earlier arrival time
  and the same priority, only the rank can say so.
  """
  submitted = sorted(requests, key=lambda r: (r.step, r.time, r.id))
  ties_agree = [r.key() for r in sorted(submitted, key=lambda r: r.priority)] == sorted(
    r.key() for r in requests
  )
  if c["policy"] != "priority" or ties_agree:
    return list(requests)
  rank = {r.id: i for i, r in enumerate(sorted(requests, key=Request.key))}
  return [dataclasses.replace(r, priority=rank[r.id]) for r in requests]


def delivered(
  driver: Driver, step: Step, requests: Mapping[str, Request], sampled: Mapping[str, Any]
) -> tuple[dict[str, int], set[str]]:
  """How many outputs each request gets of a step, and whom a token or their own count ends.

  Without a word on what the model samples it is one token: every draft is rejected. Tokens beyond
  those that the step verifies are left out; it differs in what it schedules then.

  Raises:
    Unsupported: several tokens at once without drafts, or none where there must be one.
  """
  counts, ended = {}, set()
  for name in driver.yields(step):
    if sampled.get(name) == []:
      raise Unsupported(f"deliberate: a step that reaches request {name}'s last token yields one")
    if len(sampled.get(name) or ()) > 1 and not driver.config.max_drafts:
      raise Unsupported(f"several tokens at once for request {name} without drafts")
    tokens = (sampled.get(name) or [None])[: 1 + step.drafts.get(name, 0)]
    for counts[name], token in enumerate(tokens, 1):
      if requests[name].ends(driver.outputs[name] + counts[name], token):
        ended.add(name)
        break
  return counts, ended


def propose(driver: Driver, drafts: Mapping[str, Sequence[int]] | None) -> None:
  """Offers drafts, if there are any.

  Raises:
    Unsupported: the scenario does not say how many there may be.
  """
  counts = {str(name): len(tokens) for name, tokens in (drafts or {}).items()}
  if not any(counts.values()):
    return
  if max(counts.values()) > driver.config.max_drafts:
    raise Unsupported("drafts without num_spec_tokens")
  driver.propose(counts)


def view(driver: Driver, step: Step) -> dict[str, Any]:
  """What vLLM reports right after schedule()."""
  return {
    "scheduled": step.tokens,
    "new": [name for name in step.admitted if name not in step.resumed],
    "resumed": step.resumed,
    "preempted": step.preempted,
    "running": driver.running(),
    "waiting": driver.waiting(),
    "free_blocks": driver.free_pages(),
    "num_computed_after_schedule": step.computed,
    "num_sampled": {name: int(samples) for name, samples in step.samples.items()},
    "scheduled_draft_tokens": step.drafts,
  }


UNORDERED = frozenset({"preempted", "finished", "scheduled_contains"})


def seen_value(field: str, seen: Mapping[str, Any], expected: Any) -> Any:
  """The seen value that an expected field is compared with; see `is_known`."""
  if field == "scheduled_contains":
    return sorted(name for name in expected if name in seen["scheduled"])
  if field.startswith("n_"):
    return len(seen[field.removeprefix("n_")])
  return sorted(seen[field]) if field in UNORDERED else seen[field]


def is_known(field: str, seen_fields: Collection[str]) -> bool:
  """Whether `seen_value` can compare a field."""
  lists = {f"n_{field}" for field in seen_fields if field not in ("free_blocks",)}
  return field in seen_fields or field in lists or field == "scheduled_contains"
