"""The table of scheduling policies: every system people compare against, on one state.

Each entry is a rule composed from `rules`, its formula, its source and where it deviates. All of
them keep the laws of the scheduler (tokens within the budget, pages conserved, progress), except
where `exceptions` says so.
"""

from collections.abc import Hashable, Mapping

from jaxserve import cost
from jaxserve.config import SchedulerConfig
from jaxserve.sched import drafts, sglang_round
from jaxserve.sched.policy import Policy, Rule, alternate, chain, first_of
from jaxserve.sched.rules import (
  admit,
  cap_by_stage,
  cap_by_threshold,
  decodes,
  fit_pages,
  prompts,
  serve,
  stage_cap,
)
from jaxserve.sched.sglang import sglang
from jaxserve.sched.shaping import hold_newcomers, keep_under_target, trim_to_bucket

_VLLM_V1 = chain(cap_by_threshold(), drafts.serve_running(), fit_pages(), drafts.verify(), admit())
_DECODES = chain(serve(decodes), fit_pages(evict_when_full=True))
_DECODE_WAITS = frozenset({"decode_waits"})


def _sglang(rule: Rule, formula: str, words: str) -> Policy:
  return Policy(
    rule=rule,
    formula=formula,
    words=words,
    source="SGLang 2026, Scheduler.get_next_batch_to_run and PrefillAdder, without radix cache",
    deviates="a request that nothing runs beside is admitted without the test of memory, and a "
    "chunk below one page is not cut to pages: SGLang would wait for ever; what can never fit is "
    "refused when submitted, so the last row is not aborted; it is retracted if the chunk slot "
    "holds the rest; a chunk takes no more than the free pages, and a prompt enters only if the "
    "decodes beside it have theirs: SGLang would run out of memory; equal victims go latest "
    "admission first",
    defaults=sglang_round.DEFAULTS,
    ranges=sglang_round.RANGES,
    no_prefix_cache="its round is without radix cache",
    exceptions=_DECODE_WAITS | {"idle_steps"},
  )


POLICIES: Mapping[str, Policy] = {
  "vllm_v1": Policy(
    rule=_VLLM_V1,
    formula="running requests in order take min(need, what is left of the budget), then the head "
    "of the waiting queue; need = known - computed, capped by long_prefill_token_threshold",
    source="vLLM V1, Scheduler.schedule",
    words="serves who runs in order of arrival: streams go on, a prompt gets what they leave.",
    deviates="victims are chosen before anyone is served; under 'priority' one key orders service "
    "and victims; reserve='growth' keeps room for prompts already admitted ('gate' is vLLM's "
    "rule); drafts come after the token of every decode, and nobody is preempted for them",
    drafts=True,
  ),
  "sarathi": Policy(
    rule=chain(_DECODES, serve(prompts), admit(pages="prompt")),
    formula="every decode, then prompts under way, then new ones, each min(left, C - used); a "
    "newcomer is given the pages of its whole prompt",
    source="Sarathi-Serve (OSDI 2024), stall-free batching",
    words="gives every stream its token, then fills the step with chunks of prompts.",
    deviates="a preempted request keeps its count of outputs; the watermark counts only while "
    "something runs, so that a prompt as large as the pool is served, and it then does not evict "
    "itself for want of a page that it does not need",
  ),
  "sarathi_dynamic": Policy(
    rule=chain(cap_by_stage(), _DECODES, serve(prompts), admit(pages="prompt", cap=stage_cap)),
    formula="sarathi, with chunks that fall from high to low in equal stages of the prompt",
    source="Sarathi-Serve, dynamic chunk schedule",
    words="does as sarathi, with chunks that shrink as a prompt advances.",
    deviates="beyond max_tokens the last stage goes on instead of an assertion",
    defaults=(("low", 512), ("high", 2048), ("stages", 4), ("max_tokens", 8192)),
  ),
  "slo_aware": Policy(
    rule=chain(
      cap_by_threshold(),
      serve(decodes),
      keep_under_target(),
      serve(prompts),
      fit_pages(),
      admit(),
      hold_newcomers(),
    ),
    formula="every decode, then prompts in order as vllm_v1, while max(token_ms n, weights_ms) + "
    "pair_ms (query-key pairs) + kv_ms (resident tokens) <= itl_target_ms; min_chunk where nobody "
    "decodes",
    source="jaxserve, the cost model of jaxserve.cost; its numbers are those of Llama-3-8B on one "
    "H100, see cost.step_terms",
    words="gives every stream its token and a prompt as much as keeps the predicted step within a "
    "target, so chunks shrink as the prompt advances.",
    defaults=(
      ("itl_target_ms", 50.0),
      ("min_chunk", 64),
      *cost.step_terms(cost.LLAMA3_8B, cost.H100).items(),
    ),
  ),
  "bucket_shaped": Policy(
    rule=chain(_VLLM_V1, trim_to_bucket()),
    formula="vllm_v1, then the newest chunks are cut until the step fills a token bucket, where "
    "more than max_padding of the next bucket would stay empty",
    source="jaxserve, engine buckets",
    words="does as vllm_v1, but cuts the newest chunks so that a step leaves no bucket half empty.",
    defaults=(("max_padding", 0.125),),
    drafts=True,
  ),
  "prefill_first": Policy(
    rule=first_of(chain(serve(prompts), admit(pages="prompt", whole=True)), _DECODES),
    formula="whole prompts while their sum is within the budget, alone; else all decodes",
    source="vLLM V0, Scheduler._schedule_prefills",
    words="computes waiting prompts whole and alone; every stream stands still meanwhile.",
    deviates="a prompt above the budget is refused when submitted, not dropped in the queue; a "
    "preempted request that has grown above it is computed in chunks",
    whole_prompts=True,
    exceptions=_DECODE_WAITS,
  ),
  "orca": Policy(
    rule=chain(serve(decodes), serve(prompts), admit(pages="limit", whole=True)),
    formula="all decodes, and whole prompts beside them; every request holds the pages of the "
    "longest one there may be, so nobody is preempted",
    source="Orca (OSDI 2022), iteration-level scheduling",
    words="computes whole prompts beside the streams, so a step lasts as long as its prompts.",
    deviates="an iteration is bounded by the budget; set it as large as Orca's iterations get",
    reserves_longest=True,
    whole_prompts=True,
  ),
  "static": Policy(
    rule=chain(serve(decodes), serve(prompts), admit(pages="limit", whole=True, only_if_idle=True)),
    formula="a batch of whole prompts is admitted when nothing runs, and decodes until its last "
    "member ends",
    source="FasterTransformer, request-level batching",
    words="starts a batch when the one before has ended; who comes later waits for that.",
    deviates="members that end early free their pages at once",
    reserves_longest=True,
    whole_prompts=True,
  ),
  "simple_chunking": Policy(
    rule=alternate(first_of(serve(prompts), admit(pages="prompt")), _DECODES),
    formula="by turns: a step of chunks (prompts under way, or else new ones), a step of decodes",
    source="Sarathi-Serve, the ablation 'chunked-prefills-only'",
    words="takes turns: a step of chunks of prompts, a step of streams.",
    exceptions=_DECODE_WAITS,
  ),
  "sglang": _sglang(
    sglang(),
    "a prefill batch if one can be formed (the prompt in the chunk slot, then whole prompts "
    "of the queue's head, the last cut to pages), alone; else all decodes; a newcomer must fit "
    "beside the outputs still to come, of which new_token_ratio counts; who lacks a page is "
    "retracted to the queue's tail, fewest outputs first",
    "computes chunks of prompts back to back while a prompt waits for which there is memory; "
    "every stream stands still meanwhile, unless prefill_decode_interval puts steps of streams "
    "between two chunks.",
  ),
  "sglang_mixed": _sglang(
    sglang(mixed=True),
    "sglang, with the decodes in the prefill batch; the decode set's size is taken from the "
    "chunk before the queue is looked at, so prompts wait while less than one page is left",
    "lets the streams ride in every chunk; a prompt waits while they leave less than a page of it.",
  ),
}


def find(name: Hashable) -> Policy:
  """The policy of that name; one of your own is taken as it is.

  Raises:
    ValueError: listing what exists.
  """
  if isinstance(name, Policy):
    return name
  if not isinstance(name, str) or name not in POLICIES:
    raise ValueError(f"policy={name!r}: is unknown; there are {', '.join(POLICIES)}")
  return POLICIES[name]


def rule_of(config: SchedulerConfig) -> Rule:
  """The rule of config.policy.

  Raises:
    ValueError: the policy is unknown, or does not go with a prefix cache that is on.
  """
  policy = find(config.policy)
  if config.prefix_cache and policy.no_prefix_cache:
    raise ValueError(
      f"prefix_cache=True: policy={config.policy} does not go with it ({policy.no_prefix_cache}); "
      f"turn the prefix cache off or choose another policy"
    )
  return policy.rule


def check_drafts(name: Hashable, max_drafts: int) -> None:
  """Refuses speculative decoding under a policy that has no rule for it.

  Raises:
    ValueError: naming those that have one, or what exists.
  """
  if max_drafts and not find(name).drafts:
    able = " or ".join(repr(name) for name, policy in POLICIES.items() if policy.drafts)
    raise ValueError(
      f"policy={name!r}: has no rule for draft tokens (max_drafts={max_drafts}); use {able}, or "
      "turn speculation off"
    )
