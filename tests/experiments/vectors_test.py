"""The vector runner: what passes, what differs, and what it refuses to judge."""

import copy
import json
import subprocess
import sys

import pytest

from experiments.vectors import families, sglang, suite, vllm_kv
from experiments.vectors.outcome import Differs


def request(name, prompt, **fields):
  return {"id": name, "arrival_step": 0, "prompt_len": prompt, "max_tokens": 4} | fields


def step(number, scheduled, running, free, **fields):
  """A complete record of a step in which nobody enters, leaves or samples, unless said."""
  lists = dict.fromkeys(("new", "resumed", "preempted", "waiting", "finished"), [])
  return {
    "step": number, "scheduled": scheduled, "running": running, "free_blocks": free,
    "num_sampled": dict.fromkeys(scheduled, 0),
  } | lists | fields  # fmt: skip


# Two prompts share a budget of 10; `a` stops by a token, `b` by length.
LOOP = {
  "name": "loop", "kind": "step_loop", "source": "", "note": "",
  "config": {"budget": 10, "block_size": 4, "num_blocks": 9},
  "requests": [request("a", 6, stop=42), request("b", 9, max_tokens=2)],
  "asserted_by_source": {"0": {"n_new": 2, "scheduled_contains": ["b"]}},
  "expected": [
    step(0, {"a": 6, "b": 4}, ["a", "b"], 5, new=["a", "b"], num_sampled={"a": 1, "b": 0},
         num_computed_after_schedule={"a": 6, "b": 4}),
    step(1, {"a": 1, "b": 5}, ["a", "b"], 3, num_sampled={"a": 1, "b": 1},
         sampled_by_model={"a": [42]}, finished=["a"]),
    step(2, {"b": 1}, ["b"], 5, num_sampled={"b": 1}, finished=["b"]),
    step(3, {}, [], 8),
  ],
}  # fmt: skip

# `low` is preempted for the more urgent `high`, is aborted while it waits; `late` never starts.
PRIORITY = {
  "name": "priority", "kind": "step_loop",
  "config": {"block_size": 4, "num_blocks": 5, "policy": "priority", "max_num_seqs": 2},
  "requests": [
    request("low", 8, priority=1), request("high", 8, arrival_step=1, priority=0),
    request("late", 4, arrival_step=1, priority=2),
  ],
  "expected": [
    step(0, {"low": 8}, ["low"], 2, new=["low"], num_sampled={"low": 1}),
    step(1, {"low": 1}, ["low"], 1, waiting=["high", "late"], num_sampled={"low": 1}),
    step(2, {"low": 1}, ["low"], 1, waiting=["high"], num_sampled={"low": 1},
         input_abort_before_schedule=["late"], input_finish_after_update=["low"],
         finished=["low"]),
    step(3, {"high": 8}, ["high"], 2, new=["high"], num_sampled={"high": 1}),
  ],
}  # fmt: skip

OPS = {
  "name": "ops", "kind": "ops", "config": {"asynch": True, "block_size": 4, "num_blocks": 9},
  "ops": [
    {"op": "add", "request": {"id": "a", "prompt_len": 6, "max_tokens": 2}},
    {"op": "add", "request": {"id": "b", "prompt_len": 2}},
    {"op": "schedule", "out": 0, "expect": {"scheduled": {"a": 6, "b": 2}, "free_blocks": 5}},
    {"op": "schedule", "out": 1, "expect": {"scheduled": {"a": 1, "b": 1}, "new": []}},
    {"op": "finish", "id": "b", "status": "FINISHED_ABORTED"},
    {"op": "update", "out": 0, "sampled": {"a": [7], "b": [7]}, "expect": {"finished": []}},
    {"op": "update", "out": 1, "sampled": {"a": [8]},
     "expect": {"finished": ["a"], "running": []}},
  ],
  "final": {
    "total_scheduled_tokens": 10, "outputs": {"a": 2, "b": 0}, "request_a_outputs": [7, 8],
    "free_blocks": 8,
  },
}  # fmt: skip

KV = {
  "name": "kv", "kind": "kv_manager",
  "config": {"block_size": 4, "num_blocks": 6, "usable_blocks": 5, "prefix_caching": False},
  "ops": [
    {"op": "allocate", "id": "a", "prompt": "9 tokens 0..8", "new_tokens": 5, "lookahead": 2,
     "expect": {"new_blocks": [1, 2], "hit_blocks": [], "cached_tokens": 0, "free_after": 3}},
    {"op": "allocate", "id": "b", "prompt": "tokens 0..15", "new_tokens": 4,
     "full_prompt_must_fit": True, "expect": {"new_blocks": None, "free_after": 3}},
    {"op": "allocate", "id": "a", "prompt": "same request", "new_tokens": 4,
     "expect": {"new_blocks": [3], "free_after": 2}},
    {"op": "free", "id": "a", "expect": {"free_queue": [3, 2, 1, 4, 5]}},
  ],
}  # fmt: skip

# A running decoder family and two prompts under a chunk of 12; the second is cut.
ROUNDS = {
  "name": "rounds", "policy": "vllm_v1", "config": {"chunk_size": 12, "block_size": 4},
  "requests": [
    {"id": "P", "prompt": 7, "max_new": 2}, {"id": "Q", "prompt": 6, "max_new": 3, "stop_at": 1},
    {"id": "d", "count": 2, "prompt": 5, "max_new": 9, "out": 3},
  ],
  "steps": 3, "why": "",
  "expected": [
    {"step": 0, "prefill": [["P", 0, 7], ["Q", 0, 3]], "decode": ["d*2"], "tokens": 12,
     "chunked_req": "Q"},
    {"step": 1, "prefill": [["Q", 3, 3]], "decode": ["P", "d*2"], "tokens": 6,
     "chunked_req": None, "finished": ["P", "Q"], "preempted": []},
    {"step": 2, "prefill": [], "decode": ["d0", "d1"], "tokens": 2},
  ],
}  # fmt: skip

CASES = {
  "config_cases": [
    {"config": {"budget": 8, "max_num_seqs": 9}, "result": "error", "why": ""},
    {"config": {"policy": "longest"}, "result": "error"},
    {"config": {"watermark": 0.5}, "result": "ok"},
    {"config": {"budget": 99, "max_num_seqs": 2, "max_model_len": 40}, "result": "warning"},
  ],
  "request_cases": [
    {"request": {"prompt_len": 0}, "result": "error"},
    {"request": {"prompt_len": 30, "max_model_len": 31, "max_tokens": None}, "result": "ok"},
  ],
}
DOCUMENT = {
  "meta": {"defaults_for_missing_config_keys": {"max_model_len": 64}},
  **CASES,
  "scenarios": [LOOP, PRIORITY, ROUNDS],
  "ops_scenarios": [OPS],
  "kv_scenarios": [KV],
}


def outcome_of(scenario):
  section = "scenarios" if "name" in scenario else "config_cases"
  return suite.run_one(section, "it", scenario, {"max_model_len": 64})


def changed(scenario, *path, to):
  """A copy with the value at the path replaced."""
  scenario = copy.deepcopy(scenario)
  *parents, last = path
  at = scenario
  for key in parents:
    at = at[key]
  at[last] = to
  return scenario


def test_every_scenario_passes_and_is_reported_once():
  outcomes = list(suite.run(DOCUMENT))
  assert not [o for o in outcomes if o.kind != "pass"]
  names = [o.name for o in outcomes]
  assert names[0] == "config_cases[0]" and names[-1] == "kv" and len(names) == 11
  assert [o.line for o in suite.run(DOCUMENT, only="loop")] == ["pass loop"]


WRONG = [
  (LOOP, ("expected", 0, "scheduled"), {"a": 6, "b": 3}),
  (LOOP, ("expected", 0, "new"), ["b", "a"]),
  (LOOP, ("expected", 0, "running"), ["b", "a"]),
  (LOOP, ("expected", 0, "waiting"), ["a"]),
  (LOOP, ("expected", 0, "resumed"), ["a"]),
  (LOOP, ("expected", 0, "preempted"), ["a"]),
  (LOOP, ("expected", 0, "num_sampled"), {"a": 1, "b": 1}),
  (LOOP, ("expected", 0, "num_computed_after_schedule"), {"a": 6, "b": 5}),
  (LOOP, ("expected", 1, "finished"), []),
  (LOOP, ("expected", 3, "free_blocks"), 7),
  (LOOP, ("asserted_by_source", "0", "n_new"), 1),
  (LOOP, ("asserted_by_source", "0", "scheduled_contains"), ["c"]),
  (PRIORITY, ("expected", 1, "waiting"), ["late", "high"]),
  (PRIORITY, ("expected", 2, "finished"), []),
  (OPS, ("ops", 3, "expect", "scheduled"), {"a": 1}),
  (OPS, ("ops", 5, "expect", "finished"), ["a"]),
  (OPS, ("ops", 5, "sampled"), {}),
  (OPS, ("final", "total_scheduled_tokens"), 11),
  (OPS, ("final", "request_a_outputs"), [8, 7]),
  (OPS, ("final", "outputs"), {"b": 1}),
  (KV, ("ops", 0, "expect", "new_blocks"), [1, 2, 3]),
  (KV, ("ops", 1, "expect", "free_after"), 2),
  (KV, ("ops", 3, "expect", "free_queue"), [1, 2, 3, 4, 5]),
  (ROUNDS, ("expected", 0, "prefill"), [["P", 0, 7], ["Q", 0, 2]]),
  (ROUNDS, ("expected", 0, "decode"), ["d*1"]),
  (ROUNDS, ("expected", 0, "chunked_req"), "P"),
  (ROUNDS, ("expected", 1, "tokens"), 7),
  (ROUNDS, ("expected", 1, "finished"), ["P"]),
  (ROUNDS, ("expected", 1, "preempted"), ["d*1"]),
  (ROUNDS, ("expected", 2, "decode"), ["d0", "d2"]),
  (CASES["config_cases"][0], ("result",), "ok"),
  (CASES["config_cases"][2], ("result",), "warning"),
]


@pytest.mark.parametrize(("scenario", "path", "to"), WRONG, ids=[str(p) for _, p, _ in WRONG])
def test_a_wrong_expectation_differs_and_names_the_field(scenario, path, to):
  outcome = outcome_of(changed(scenario, *path, to=to))
  assert outcome.kind == "differs", outcome
  assert str(path[-1]) in outcome.why or path[-1] == "sampled"


UNSUPPORTED = [
  (LOOP, ("surprise",), 1, "unknown field surprise"),
  (LOOP, ("config", "surprise"), 1, "unknown field surprise in config"),
  (LOOP, ("requests", 0, "surprise"), 1, "unknown field surprise in request"),
  (LOOP, ("expected", 2, "surprise"), 1, "unknown field surprise in step 2"),
  (LOOP, ("asserted_by_source", "0", "surprise"), 1, "unknown field surprise in asserted"),
  (LOOP, ("kind",), "surprise", "kind surprise"),
  (LOOP, ("config", "draft_slots_per_request"), 2, "deliberate: a draft model"),
  (LOOP, ("config", "policy"), "longest", "no policy longest"),
  (LOOP, ("expected", 0, "drafts_given_after_step"), {"a": [1]}, "drafts"),
  (LOOP, ("expected", 0, "input_throttle"), True, "throttled"),
  (LOOP, ("expected", 0, "sampled_by_model"), {"a": [1, 2]}, "drafts"),
  (OPS, ("ops", 3, "op"), "reset_prefix_cache", "prefix cache"),
  (OPS, ("ops", 3, "op"), "surprise", "unknown operation surprise"),
  (OPS, ("ops", 3, "surprise"), 1, "unknown field surprise"),
  (OPS, ("ops", 3, "expect", "surprise"), 1, "unknown field surprise"),
  (OPS, ("final", "surprise"), 1, "unknown field surprise in final"),
  (OPS, ("ops", 5, "out"), 1, "out of order"),
  (KV, ("config", "drop_last_hit_block"), True, "drafters"),
  (KV, ("ops", 1, "op"), "reset", "operation 1"),
  (KV, ("ops", 1, "prompt"), "uncommon + 3", "prompt not understood"),
  (KV, ("ops", 1, "expect", "surprise"), 1, "unknown field surprise"),
  (ROUNDS, ("policy",), "orca_next", "no policy orca_next yet"),
  (ROUNDS, ("expected", 0, "surprise"), 1, "unknown field surprise"),
  (ROUNDS, ("expected", 0, "new_token_ratio"), 0.5, "has no new_token_ratio"),
  (ROUNDS, ("config", "surprise"), 1, "unknown field surprise in config"),
  (CASES["config_cases"][0], ("config", "surprise"), 1, "unknown field surprise"),
]


@pytest.mark.parametrize(("scenario", "path", "to", "why"), UNSUPPORTED)
def test_what_would_not_be_compared_is_unsupported(scenario, path, to, why):
  outcome = outcome_of(changed(scenario, *path, to=to))
  assert outcome.kind == "unsupported" and why in outcome.why, outcome


def loop(config, requests, *steps):
  return {
    "name": "x", "kind": "step_loop", "config": config, "requests": requests,
    "expected": list(steps),
  }  # fmt: skip


DELIBERATE = [
  (loop({"num_blocks": 3, "block_size": 4}, [request("a", 9)], {"step": 0, "scheduled": {}}),
   "request a of 9 tokens exceeds the pool of 8"),
  (loop({"budget": 8, "chunking": False}, [request("a", 9)], {"step": 0, "scheduled": {}}),
   "without chunking"),
  # A pool that holds the prompt but not all outputs: only a difference is excused.
  (loop({"num_blocks": 3, "block_size": 4}, [request("a", 8)], {"step": 1, "preempted": []}),
   "may need 11 slots of 8"),
  (loop({"max_model_len": 10}, [request("a", 8, max_tokens=9, min_tokens=9)],
        {"step": 1, "finished": []}),
   "max_model_len beats min_tokens"),
  # `lo` needs a page in step 2 and is the least urgent: its own victim.
  (loop({"block_size": 4, "num_blocks": 4, "policy": "priority"},
        [request("lo", 3, priority=5, max_tokens=6),
         request("hi", 5, priority=1, arrival_step=1, max_tokens=3)],
        {"step": 2, "scheduled": {}, "preempted": ["lo"], "running": ["hi"]}),
   "victims are chosen first"),
  # Both still prefill; admitted first, `lo` takes its two tokens first there.
  (loop({"budget": 3, "threshold": 2, "policy": "priority"},
        [request("lo", 20, priority=5), request("hi", 20, priority=1, arrival_step=1)],
        {"step": 1, "scheduled": {"lo": 2, "hi": 1}},
        {"step": 2, "scheduled": {"lo": 2, "hi": 1}, "running": ["lo", "hi"]}),
   "one key orders service and victims"),
]  # fmt: skip


@pytest.mark.parametrize(("scenario", "why"), DELIBERATE)
def test_deliberate_differences_are_found_by_rules(scenario, why):
  outcome = outcome_of(scenario)
  assert outcome.kind == "unsupported" and outcome.why.startswith("deliberate: "), outcome
  assert why in outcome.why


def test_rules_do_not_excuse_other_differences():
  scenario = DELIBERATE[4][0]
  assert outcome_of(changed(scenario, "expected", 0, "preempted", to=["hi"])).kind == "differs"
  assert outcome_of(changed(scenario, "expected", 0, "scheduled", to={"lo": 1})).kind == "differs"
  scenario = DELIBERATE[3][0]
  assert outcome_of(changed(scenario, "expected", 0, "step", to=0)).kind == "pass"


def rounds(config, requests, *expected):
  """A scenario of SGLang; requests are (id, prompt, max_new, other fields)."""
  records = [{"id": r[0], "prompt": r[1], "max_new": r[2], **(r[3] if r[3:] else {})}
             for r in requests]  # fmt: skip
  steps = [{"step": number} | fields for number, fields in enumerate(expected)]
  return {"name": "x", "policy": "sglang", "config": config, "requests": records,
          "expected": steps}  # fmt: skip


def prefill(*rows, decode=(), **fields):
  rows, decode = [list(row) for row in rows], list(decode)
  return {"prefill": rows, "decode": decode} | fields


LONG = [("A", 8700, 2), ("B", 9000, 2)]
GATED = {"page_size": 1, "chunked_prefill_size": 8192, "max_prefill_tokens": 8192}
SGLANG = {
  # A's outputs count whole when it enters, by the ratio from then on; 255 < 255 is false.
  "two speeds of reserving": rounds(
    {"page_size": 1, "chunked_prefill_size": 2048, "pool_tokens": 1024},
    [("A", 512, 256), ("B", 100, 154)],
    prefill(("A", 0, 512), batch_is_full=True),
    prefill(("B", 0, 100), batch_is_full=False, new_token_ratio=0.7),
    prefill(decode=["A", "B"], new_token_ratio=0.6989967),
  ),
  # The third drives the input budget below zero, after it has entered.
  "input budget": rounds(
    {"page_size": 1, "chunked_prefill_size": 8192, "max_prefill_tokens": 2048},
    [("r", 1000, 2, {"count": 4})],
    prefill(("r*3", 0, 1000), tokens=3000), prefill(("r3", 0, 1000)),
    prefill(decode=["r*4"], finished=["r*4"]),
  ),
  "legacy gate": rounds(
    GATED | {"legacy_rem_input_gate": True}, LONG,
    prefill(("A", 0, 8192)), prefill(("A", 8192, 508)), prefill(("B", 0, 8192)),
    prefill(("B", 8192, 808)),
  ),
  "current gate": rounds(
    GATED, LONG, prefill(("A", 0, 8192)), prefill(("A", 8192, 508), ("B", 0, 7684)),
    prefill(("B", 7684, 1316)),
  ),
  # Nobody decodes, so the steps between two chunks do nothing.
  "interval without decodes": rounds(
    {"page_size": 4, "chunked_prefill_size": 16, "prefill_decode_interval": 2}, [("A", 40, 4)],
    prefill(("A", 0, 16), chunked_req="A"), prefill(tokens=0), prefill(tokens=0),
    prefill(("A", 16, 16)), prefill(), prefill(), prefill(("A", 32, 8), chunked_req=None),
    prefill(decode=["A"]),
  ),
  # D waits since step 0, C is retracted behind it. The rows that ended in step 0 still count in
  # step 1, which forgets them; an idle step starts the ratio anew; then D, and C after it.
  "to the tail": rounds(
    {"page_size": 4, "chunked_prefill_size": 64, "pool_tokens": 20},
    [("A", 7, 13, {"out": 2, "stop_at": 3}), ("B", 4, 16, {"out": 1, "stop_at": 2}),
     ("C", 8, 7, {"out": 1}), ("D", 4, 2)],
    prefill(decode=["A", "B"], retracted=["C"], finished=["A", "B"], waiting=["D", "C"],
            new_token_ratio=1.0, batch_is_full=False),
    prefill(tokens=0, new_token_ratio=0.7, batch_is_full=False),
    prefill(("D", 0, 4), batch_is_full=True),
    prefill(decode=["D"], finished=["D"], batch_is_full=True),
    prefill(batch_is_full=False),
    prefill(("C", 0, 9), batch_is_full=True),
  ),
  # The pool is full after one step; fewer outputs go.
  "conservative": rounds(
    {"page_size": 1, "chunked_prefill_size": 64, "schedule_conservativeness": 0.3,
     "retract_decode_steps": 5, "pool_tokens": 25},
    [("A", 10, 14, {"out": 2}), ("B", 10, 14, {"out": 3})],
    prefill(decode=["A", "B"], new_token_ratio=0.2096990, free_tokens=0),
    prefill(decode=["B"], retracted=["A"], new_token_ratio=9 / 15),
  ),
  "page reserve": rounds(
    {"page_size": 16, "chunked_prefill_size": 64, "pool_tokens": 128},
    [("A", 32, 16), ("B", 40, 30)], prefill(("A", 0, 32), batch_is_full=True),
  ),
  "no page reserve": rounds(
    {"page_size": 16, "chunked_prefill_size": 96, "pool_tokens": 128, "page_overhead": False},
    [("A", 32, 16), ("B", 40, 30)], prefill(("A", 0, 32), ("B", 0, 40), tokens=72),
  ),
  "clipped outputs": rounds(
    {"page_size": 1, "chunked_prefill_size": 64, "pool_tokens": 64, "clip_max_new_tokens": 4},
    [("A", 20, 40), ("B", 20, 40)], prefill(("A", 0, 20), ("B", 0, 20)),
  ),
  # E ends in its prefill; the decoders ride, and the next chunk is not cut to pages.
  "mixed": rounds(
    {"page_size": 8, "chunked_prefill_size": 36, "enable_mixed_chunk": True},
    [("d", 5, 20, {"count": 3, "out": 2}), ("E", 7, 1), ("F", 60, 2)],
    prefill(("E", 0, 7), ("F", 0, 24), decode=["d*3"], finished=["E"], chunked_req="F"),
    prefill(("F", 24, 33), decode=["d*3"], tokens=36), prefill(("F", 57, 3), decode=["d*3"]),
    prefill(decode=["d*3", "F"], finished=["F"]),
  ),
  "mixed with an interval": rounds(
    {"page_size": 8, "chunked_prefill_size": 32, "enable_mixed_chunk": True,
     "prefill_decode_interval": 1},
    [("d", 5, 20, {"out": 2}), ("F", 40, 2)],
    prefill(("F", 0, 24), decode=["d"]), prefill(decode=["d"]),
    prefill(("F", 24, 16), decode=["d"]), prefill(decode=["d", "F"]),
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", SGLANG)
def test_rules_of_sglang(name):
  assert outcome_of(SGLANG[name]).line == "pass it"


def test_what_sglang_never_serves_differs_on_purpose():
  config = {"page_size": 1, "chunked_prefill_size": 64, "pool_tokens": 100}
  waits = rounds(config, [("A", 60, 40)], prefill(batch_is_full=True))
  outcome = outcome_of(waits)
  assert outcome.kind == "unsupported" and "for ever there: it runs alone" in outcome.why
  # The last row is aborted there; such a request is refused at submit.
  aborted = rounds(config, [("A", 90, 40, {"out": 11})], prefill(finished=["A"]))
  outcome = outcome_of(aborted)
  assert outcome.kind == "unsupported" and "may need 129 slots of 100" in outcome.why
  assert outcome_of(rounds(config, [("A", 60, 38)], prefill())).kind == "differs"


def test_a_broken_scenario_does_not_stop_the_others():
  broken = {"name": "broken", "kind": "step_loop", "config": {}, "requests": [{}], "expected": []}
  outcomes = list(suite.run({"scenarios": [broken, LOOP], "other": {}, "more": [{"name": "m"}]}))
  assert [o.kind for o in outcomes] == ["differs", "pass", "unsupported", "unsupported"]
  assert "KeyError" in outcomes[0].why and outcomes[2].why == "unknown section"


@pytest.mark.parametrize(
  ("name", "config", "policy", "numbers", "arguments"),
  [
    ("sglang", {"page_size": 8, "chunked_prefill_size": 64, "pool_tokens": 80}, "sglang",
     {"max_num_seqs": 6}, {"chunked_prefill_size": 64}),
    ("sglang", {"enable_mixed_chunk": True, "max_running_requests": 2}, "sglang_mixed",
     {"max_num_seqs": 2}, {}),
    ("sarathi", {"chunk_size": 32, "block_size": 4, "num_blocks": 200}, "sarathi",
     {"budget": 32, "watermark_pages": 2}, {}),
    ("sarathi", {"dynamic": {"low": 8, "high": 64}}, "sarathi", {"budget": 64},
     {"dynamic": {"low": 8, "high": 64}}),
    ("vllm", {"max_batched_tokens": 50}, "prefill_first", {"budget": 50}, {}),
    ("orca", {"max_model_len": 128}, "orca", {"budget": 48}, {}),
  ],
)  # fmt: skip
def test_adapters_map_policies_and_their_configuration(name, config, policy, numbers, arguments):
  records = [{"id": "r", "count": 2, "prompt": 10, "max_new": 5}, {"id": "s", "prompt": 10,
             "max_new": 5}]  # fmt: skip
  requests, family = sglang.parse_requests(records)
  assert family == {"r0": "r", "r1": "r", "s": "s"}
  adapted = sglang.adapt(name, config, requests)
  assert (adapted.policy, dict(adapted.arguments)) == (policy, arguments)
  assert numbers.items() <= adapted.numbers.items()
  assert adapted.shape["num_pages"] == {"pool_tokens": 10, "num_blocks": 200}.get(
    next((k for k in ("pool_tokens", "num_blocks") if k in config), ""),
    adapted.shape["num_pages"],
  )


def test_families_match_in_any_order_and_by_what_is_left():
  family = {"r0": "r", "r1": "r", "r2": "r", "x": "x"}
  rows = [("r0", 0, 5), ("r2", 0, 3), ("r1", 0, 5)]
  families.match_prefills("it", rows, [["r*2", 0, 5], ["r2", 0, 3]], family)
  families.match_names("it", ["x", "r1", "r0"], ["r0", "r*1", "x"], family)
  for expected in (["r*3", "x"], ["r*1", "x"], ["r*2"], ["y"]):
    with pytest.raises(Differs):
      families.match_names("it", ["x", "r1", "r0"], expected, family)


@pytest.mark.parametrize(
  ("text", "length"),
  [("10 tokens 0..9", 10), ("tokens 87..134", 48), ("0..15", 16), ("160 x tok99", 160),
   ("same request, num_tokens=64, num_computed=59", 64)],
)  # fmt: skip
def test_prompts_in_words(text, length):
  assert vllm_kv.prompt_length(text) == length


@pytest.mark.parametrize("free_blocks, code", [(8, 0), (7, 1)])
def test_command_line(tmp_path, free_blocks, code):
  path = tmp_path / "vectors.json"
  scenario = changed(LOOP, "expected", 3, "free_blocks", to=free_blocks)
  unsupported = changed(ROUNDS, "policy", to="orca_next")
  path.write_text(json.dumps({"scenarios": [scenario, unsupported]}))
  command = [sys.executable, "-m", "experiments.vectors", "--file", str(path)]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  lines = done.stdout.splitlines()
  assert done.returncode == code, done.stderr
  first = "differs loop: step 3 free_blocks: expected 7, got 8" if code else "pass loop"
  assert lines[:2] == [first, "unsupported rounds: no policy orca_next yet"]
  assert json.loads(lines[2]) == {"pass": 1 - code, "differs": code, "unsupported": 1}
