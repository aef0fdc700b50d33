"""Recorded decisions with a prefix cache: what is compared, and what is meant to differ."""

import pytest

from tests.experiments.vectors_test import changed, loop, outcome_of, request


@pytest.mark.parametrize(
  ("twin", "second"), [({}, 40), ({"fill": 5}, 8), ({"fill": 5, "skip_prefix_read": True}, 40)]
)
def test_a_twin_of_the_same_step_computes_what_is_left(twin, second):
  scenario = loop(
    {"prefix_caching": True},
    [request("a", 40, fill=5), request("b", 40, **twin)],
    {"step": 0, "scheduled": {"a": 40, "b": second}},
  )
  assert outcome_of(scenario).kind == "pass"


# Pages of 4: a holds 1, 2, 3; b shares 1, 2 and gets 4; 3 and 4 are not full.
SHARED = {
  "name": "shared", "kind": "kv_manager",
  "config": {"block_size": 4, "num_blocks": 6, "usable_blocks": 5, "prefix_caching": True},
  "ops": [
    {"op": "allocate", "id": "a", "prompt": "tokens 0..9", "new_tokens": 10,
     "expect": {"new_blocks": [1, 2, 3], "hit_blocks": []}},
    {"op": "allocate", "id": "b", "prompt": "tokens 0..10", "new_tokens": 3,
     "expect": {"new_blocks": [4], "hit_blocks": [1, 2], "cached_tokens": 8, "free_after": 1}},
    {"op": "reset", "expect": False},
    {"op": "free", "id": "a", "expect": {"free_queue": [3, 5]}},
    {"op": "free", "id": "b", "expect": {"free_queue": [4, 3, 5, 2, 1]}},
    {"op": "lookup", "prompt": "tokens 0..8", "expect": {"hit_blocks": [1, 2]}},
    {"op": "lookup", "prompt": "tokens 0..7, salt1", "expect": {"cached_tokens": 0}},
    {"op": "reset", "expect": True},
    {"op": "lookup", "prompt": "tokens 0..8", "expect": {"cached_tokens": 0}},
  ],
}  # fmt: skip


@pytest.mark.parametrize(
  ("path", "to"),
  [(("ops", 1, "expect", "hit_blocks"), [1]), (("ops", 4, "expect", "free_queue"), [1, 2, 3, 4, 5]),
   (("ops", 2, "expect"), True), (("ops", 5, "expect", "hit_blocks"), [1])],
)  # fmt: skip
def test_shared_pages_are_compared(path, to):
  assert outcome_of(SHARED).kind == "pass"
  assert outcome_of(changed(SHARED, *path, to=to)).kind == "differs"


def test_what_a_second_copy_of_the_same_text_changes_is_deliberate():
  again = {"op": "allocate", "id": "b", "prompt": "tokens 0..10, prompt_logprobs", "new_tokens": 11}
  ops = [SHARED["ops"][0], again | {"expect": {"new_blocks": None}}]
  roomy = SHARED | {"config": SHARED["config"] | {"num_blocks": 11, "usable_blocks": 10}}
  ops.append({"op": "free", "id": "b", "expect": {"free_queue": [6, 7, 8, 9, 10, 5, 4]}})
  ops[1]["expect"] = {"new_blocks": [4, 5, 6], "hit_blocks": []}
  assert outcome_of(roomy | {"ops": ops}).kind == "pass"
  ops.append({"op": "free", "id": "a", "expect": {"free_queue": [3, 6, 7, 8, 9, 10, 5, 4, 2, 1]}})
  outcome = outcome_of(roomy | {"ops": ops})
  assert outcome.kind == "unsupported" and "one page per content" in outcome.why


def test_a_second_turn_computes_what_no_page_holds():
  turns = {
    "name": "turns", "kind": "summary", "config": {"prefix_caching": True, "asynch": True},
    "note": "turn 1: two prompts of 20, 30 outputs each",
    "expected": {"turn2_scheduled_each": 50 % 16},
  }  # fmt: skip
  assert outcome_of(turns).kind == "pass"
  assert outcome_of(changed(turns, "expected", "turn2_scheduled_each", to=3)).kind == "differs"
  assert outcome_of(turns | {"note": ""}).kind == "unsupported"
