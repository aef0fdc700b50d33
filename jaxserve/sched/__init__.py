"""The scheduler: pure functions over `SchedulerState`.

A step is `schedule` (who computes how many tokens, over which pages), `lay_out` (the same as one
fixed-shape plan) and, when the step's outputs are known, `commit` (who has finished). Requests
enter by `submit` and may leave by `abort`. All of them can be jitted, vmapped and scanned.
"""

from jaxserve.sched.layout import lay_out
from jaxserve.sched.lifecycle import abort, commit, init, submit
from jaxserve.sched.limits import check_request, chunking_allowed, make_params, request_limit
from jaxserve.sched.policies import POLICIES
from jaxserve.sched.policies import find as find_policy
from jaxserve.sched.policy import MOST_IDLE_STEPS, Policy, alternate, chain, first_of
from jaxserve.sched.step import schedule

__all__ = [
  "MOST_IDLE_STEPS", "POLICIES", "Policy", "abort", "alternate", "chain", "check_request",
  "chunking_allowed", "commit", "find_policy", "first_of", "init", "lay_out", "make_params",
  "request_limit", "schedule", "submit",
]  # fmt: skip
