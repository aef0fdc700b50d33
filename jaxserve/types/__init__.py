"""Records that cross packages, and the axis letters they are written in.

Q accepted requests, R plan rows (max_num_seqs), T tokens of the bucket, M pages per request,
N pages in the pool, S tokens per page, W attention work items, L layers, Hq/Hkv query/KV heads,
D head dim, V vocabulary. A request is named by its index in [0, Q), a row by its index in [0, R).

Padding is positive and out of range (Q for a request, R for a row, N * S + t for a slot), never -1,
which JAX would wrap, and never a huge id, which would overflow when multiplied.
"""

from jaxserve.types.plan import StepPlan, cut_plan, pack_plan, plan_parts, unpack_plan
from jaxserve.types.reuse import PrefixPool, Reuse
from jaxserve.types.sampling import LogitEdits, PromptOutput, SamplingTable, StepOutput
from jaxserve.types.state import Decision, PagePool, SchedulerParams, SchedulerState, Status

__all__ = [
  "Decision", "LogitEdits", "PagePool", "PrefixPool", "PromptOutput", "Reuse", "SamplingTable",
  "SchedulerParams",
  "SchedulerState", "Status", "StepOutput", "StepPlan", "cut_plan", "pack_plan", "plan_parts",
  "unpack_plan",
]  # fmt: skip
