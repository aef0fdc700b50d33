"""What the scheduler knows, what it may be told to sweep, and what it decides in one step."""

import enum
from typing import Any

import jax

from jaxserve.pytree import pytree_dataclass


class Status(enum.IntEnum):
  """Life of a request slot. A preempted request is WAITING again, with outputs to replay."""

  FREE = 0
  WAITING = 1
  RUNNING = 2


@pytree_dataclass
class PagePool:
  """KV pages that nobody holds, as a stack.

  free_pages: i32[N]; the first `num_free` are free page ids, the top of the stack last.
  num_free: i32[].
  """

  free_pages: jax.Array
  num_free: jax.Array


@pytree_dataclass
class SchedulerParams:
  """Numbers one may sweep, slide or vmap over without recompiling.

  budget: i32[], most tokens computed in one step; in [1, config.max_budget].
  max_num_seqs: i32[], seats in use; at most config.max_num_seqs.
  long_prefill_token_threshold: i32[], most tokens of one request per step; 0 = no cap.
  cap_when_alone: bool[], whether that cap also holds for a lone request (vLLM V1: yes).
  chunked_prefill: bool[], False: a prompt is admitted only into a step that holds it whole, unless
    it exceeds the budget, as a preempted request with many outputs may: then it is cut.
  watermark_pages: i32[], pages an admission must leave free while anything runs.
  policy: hyper-parameters of the policy by name, f32[] each; {} for most.
  """

  budget: jax.Array
  max_num_seqs: jax.Array
  long_prefill_token_threshold: jax.Array
  cap_when_alone: jax.Array
  chunked_prefill: jax.Array
  watermark_pages: jax.Array
  policy: dict[str, jax.Array]


@pytree_dataclass
class SchedulerState:
  """All requests and all pages. Fixed shapes, so it can be jitted, scanned and vmapped.

  There is no prefill or decode phase: a step moves `num_computed` towards `num_known`.

  queue: i32[Q], accepted requests, running and waiting, in order of service: by arrival, or by
    (priority, arrival); then Q. A preempted request keeps its place, unless the policy moves it.
  status: i32[Q], a `Status`.
  arrival: i32[Q], submit number, unique: proof that a slot was not reused.
  priority: i32[Q], smaller is more urgent; 0 under FCFS.
  num_prompt: i32[Q], prompt tokens.
  num_known: i32[Q], prompt tokens and outputs, one that is still being computed included.
  num_computed: i32[Q], tokens whose KV is written, or promised by a step already scheduled.
  max_total: i32[Q], num_known at which the request ends by length.
  num_in_flight: i32[Q], outputs scheduled but not yet committed.
  await_host: bool[Q], the request may not be scheduled while an output is in flight.
  num_pages: i32[Q], pages held.
  block_tables: i32[Q, M], their ids, in order of position; meaningless from num_pages on.
  num_preemptions: i32[Q], since submit.
  pool: PagePool, or PrefixPool with `SchedulerConfig.prefix_cache`.
  num_submitted: i32[], the next submit number.
  reuse: Reuse, None without `SchedulerConfig.prefix_cache`.
  policy: what the policy remembers from step to step, a pytree; empty for most.
  num_drafts: i32[Q], draft tokens proposed behind the last known one, at positions num_known.. of
    the token table. While an output is in flight they are those of the step in flight, or stale:
    either way the request waits for it. None where config.max_drafts is 0.
  """

  queue: jax.Array
  status: jax.Array
  arrival: jax.Array
  priority: jax.Array
  num_prompt: jax.Array
  num_known: jax.Array
  num_computed: jax.Array
  max_total: jax.Array
  num_in_flight: jax.Array
  await_host: jax.Array
  num_pages: jax.Array
  block_tables: jax.Array
  num_preemptions: jax.Array
  pool: Any
  num_submitted: jax.Array
  policy: Any
  reuse: Any = None
  num_drafts: jax.Array | None = None


@pytree_dataclass
class Decision:
  """What one step does. Its shapes do not depend on the bucket.

  order: i32[R], scheduled requests in order of service, then Q.
  num_scheduled: i32[], how many they are.
  num_tokens: i32[], sum of `tokens`; at most the budget. Picks the bucket.
  tokens: i32[Q], tokens granted in this step; 0 = not scheduled.
  start: i32[Q], num_computed before this step.
  new_pages: i32[Q], pages handed out in this step; they end the request's block table.
  admitted: bool[Q], entered the running set in this step.
  preempted: bool[Q], left it, pages freed, to be replayed.
  samples: bool[Q], reaches its last known token, so the step yields its next one.
  arrival: i32[Q], submit numbers when the step was decided.
  cached: i32[Q], tokens of the admitted that were found in the prefix cache; None without one.
  evicted: i32[], pages whose content was lost in this step; None without a prefix cache.
  drafts: i32[Q], how many of `tokens`, the last ones, are drafts to be verified. None where
    config.max_drafts is 0.
  """

  order: jax.Array
  num_scheduled: jax.Array
  num_tokens: jax.Array
  tokens: jax.Array
  start: jax.Array
  new_pages: jax.Array
  admitted: jax.Array
  preempted: jax.Array
  samples: jax.Array
  arrival: jax.Array
  cached: Any = None
  evicted: Any = None
  drafts: jax.Array | None = None
