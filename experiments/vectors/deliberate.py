"""General rules for where jaxserve differs from vLLM on purpose; see the table in WORKSPACE.md.

A rule looks at what a step shows and at the configuration, never at the name of a scenario.
"""

from collections.abc import Mapping
from typing import Any

from experiments.vectors.vllm import Request


def reason(
  c: Mapping[str, Any],
  requests: Mapping[str, Request],
  seen: Mapping[str, Any],
  expected: Mapping[str, Any],
) -> str | None:
  """Why a step that differs was meant to, or None.

  Args:
    c: full configuration.
    requests: by name.
    seen: of the step; see `vllm.view`.
    expected: of the step.
  """
  rules = (
    _others_are_served, _one_key, _length_beats_min_tokens, _outgrows_the_pool,
    _decodes_before_drafts, _no_placeholders, _drafts_end_with_the_request, _drafts_are_awaited,
  )  # fmt: skip
  return next((why for rule in rules if (why := rule(c, requests, seen, expected))), None)


def _others_are_served(c, requests, seen, expected) -> str | None:
  """Priority: the same victims, the least urgent of all, and more requests served."""
  if c["policy"] != "priority" or "scheduled" not in expected:
    return None
  victims = expected.get("preempted") or []
  if not victims or sorted(victims) != seen["preempted"]:
    return None
  worst = min(requests[name].key() for name in victims)
  if any(requests[name].key() > worst for name in seen["running"]):
    return None
  ours, theirs = seen["scheduled"], expected["scheduled"]
  more = set(ours) - set(theirs)
  if not more or any(ours.get(name) != tokens for name, tokens in theirs.items()):
    return None
  return (
    f"priority: victims are chosen first, so {', '.join(sorted(more))} is served in the step that "
    f"preempts {', '.join(victims)}"
  )


def _one_key(c, requests, seen, expected) -> str | None:
  """Priority: a full budget shared in order of urgency instead of order of admission."""
  if c["policy"] != "priority" or "scheduled" not in expected or seen["preempted"]:
    return None
  ours, theirs = seen["scheduled"], expected["scheduled"]
  if sum(ours.values()) != sum(theirs.values()) or ours == theirs:
    return None
  keys = [requests[name].key() for name in seen["running"]]
  full = sum(ours.values()) == c["budget"]
  if full and keys != sorted(keys) and expected.get("running", seen["running"]) == seen["running"]:
    return "priority: one key orders service and victims; vLLM serves in order of admission"
  return None


def _length_beats_min_tokens(c, requests, seen, expected) -> str | None:
  """min_tokens beyond max_model_len: vLLM's request never ends."""
  longer = {r.id for r in requests.values() if r.prompt + r.min_tokens > c["max_model_len"]}
  early = set(seen.get("finished", ())) - set(expected.get("finished", ()))
  if early and early <= longer:
    return f"max_model_len beats min_tokens, so {', '.join(sorted(early))} ends"
  return None


def _outgrows_the_pool(c, requests, seen, expected) -> str | None:
  """A request whose last token would not fit the pool even alone: refused at submit."""
  slots = (c["num_blocks"] - 1) * c["block_size"]
  for r in requests.values():
    if r.max_tokens is None:
      continue
    needed = min(r.prompt + r.max_tokens, c["max_model_len"]) - 1
    if needed > slots:
      return f"request {r.id} may need {needed} slots of {slots} and is refused at submit"
  return None


def _decodes_before_drafts(c, requests, seen, expected) -> str | None:
  """Drafts: vLLM's fill the budget, and decodes behind them get nothing."""
  if not c["num_spec_tokens"] or "scheduled" not in expected:
    return None
  ours, theirs = seen["scheduled"], expected["scheduled"]
  starved = set(seen["running"]) - set(theirs)
  if sum(ours.values()) != sum(theirs.values()) or not starved or not set(theirs) < set(ours):
    return None
  return (
    f"drafts: every decode gets its token before any draft, so {', '.join(sorted(starved))} does"
  )


def _no_placeholders(c, requests, seen, expected) -> str | None:
  """Drafts: vLLM pads a newcomer with one token left to compute, so that all rows are alike."""
  k = c["num_spec_tokens"]
  if not k or "scheduled" not in expected:
    return None
  ours, theirs = seen["scheduled"], expected["scheduled"]
  padded = {name for name in theirs if ours.get(name) != theirs[name]}
  new = set(seen["new"]) | set(seen["resumed"])
  if padded and padded <= new and all((ours.get(n), theirs[n]) == (1, 1 + k) for n in padded):
    return "drafts: rows of a step need not be alike, so a newcomer computes no placeholders"
  return None


def _drafts_end_with_the_request(c, requests, seen, expected) -> str | None:
  """Drafts that could only become outputs beyond max_tokens: vLLM verifies and drops them."""
  ours, theirs = seen.get("scheduled", {}), expected.get("scheduled", {})
  fewer = {name for name in theirs if ours.get(name, 0) < theirs[name]}
  if not c["num_spec_tokens"] or not fewer or set(ours) != set(theirs):
    return None
  ends = {name: requests[name].prompt + (requests[name].max_tokens or 0) - 1 for name in fewer}
  if all(seen["num_computed_after_schedule"][name] == end for name, end in ends.items()):
    return f"drafts: none that max_tokens would cut off ({', '.join(sorted(fewer))})"
  return None


def _drafts_are_awaited(c, requests, seen, expected) -> str | None:
  """Drafts in flight: vLLM schedules as many again before it knows which were right."""
  ours, theirs = seen.get("scheduled", {}), expected.get("scheduled", {})
  waiting = set(theirs) - set(ours)
  if not (c["asynch"] and c["num_spec_tokens"] and waiting) or not waiting <= set(seen["running"]):
    return None
  if any(theirs.get(name) != tokens for name, tokens in ours.items()):
    return None
  return f"drafts: {', '.join(sorted(waiting))} waits until those in flight are verified"
