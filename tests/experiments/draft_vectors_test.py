"""Scenarios with draft tokens: what passes, what differs, what differs on purpose."""

import pytest

from tests.experiments.vectors_test import changed, outcome_of, request, step

# Of three drafts the first is right; then three right ones, of which the second ends the request.
DRAFTS = {
  "name": "drafts", "kind": "step_loop",
  "config": {"num_spec_tokens": 3, "block_size": 4, "num_blocks": 9},
  "requests": [request("a", 2, max_tokens=20, stop=42)],
  "expected": [
    step(0, {"a": 2}, ["a"], 7, new=["a"], num_sampled={"a": 1},
         drafts_given_after_step={"a": [1, 2, 3]}),
    step(1, {"a": 4}, ["a"], 6, num_sampled={"a": 2}, sampled_by_model={"a": [1, 5]},
         scheduled_draft_tokens={"a": 3}, num_computed_after_schedule={"a": 6},
         drafts_given_after_step={"a": [6, 42, 8]}),
    step(2, {"a": 4}, ["a"], 6, sampled_by_model={"a": [6, 42, 8, 9]}, num_sampled={"a": 2},
         scheduled_draft_tokens={"a": 3}, num_computed_after_schedule={"a": 8}, finished=["a"]),
    step(3, {}, [], 8),
  ],
}  # fmt: skip

# A budget of 6 that vLLM spends on the drafts of `a`, so that `b` waits.
GREEDY_DRAFTS = {
  "name": "greedy", "kind": "step_loop", "config": {"num_spec_tokens": 4, "budget": 6},
  "requests": [request("a", 2, max_tokens=20), request("b", 3, max_tokens=20),
               request("c", 1, max_tokens=20)],
  "expected": [
    step(0, {"a": 2, "b": 3, "c": 1}, ["a", "b", "c"], 9996, new=["a", "b", "c"],
         num_sampled={"a": 1, "b": 1, "c": 1}, drafts_given_after_step={"a": [1, 2, 3, 4]}),
    step(1, {"a": 5, "b": 1}, ["a", "b", "c"], 9996),
  ],
}  # fmt: skip


def test_drafts_pass():
  assert outcome_of(DRAFTS).line == "pass it"


WRONG = [
  (("expected", 1, "scheduled_draft_tokens"), {"a": 2}),
  (("expected", 1, "num_sampled"), {"a": 1}),
  (("expected", 2, "num_computed_after_schedule"), {"a": 10}),
  (("expected", 2, "finished"), []),
]


@pytest.mark.parametrize(("path", "to"), WRONG)
def test_a_wrong_expectation_differs_and_names_the_field(path, to):
  outcome = outcome_of(changed(DRAFTS, *path, to=to))
  assert outcome.kind == "differs" and path[-1] in outcome.why


DELIBERATE = [
  (GREEDY_DRAFTS, ("note",), "", "deliberate: drafts: every decode gets its token"),
  (DRAFTS, ("expected", 1, "sampled_by_model"), {"a": []}, "deliberate: a step that reaches"),
]


@pytest.mark.parametrize(("scenario", "path", "to", "why"), DELIBERATE)
def test_a_difference_on_purpose_is_named(scenario, path, to, why):
  outcome = outcome_of(changed(scenario, *path, to=to))
  assert outcome.kind == "unsupported" and why in outcome.why, outcome
