"""Speculative decoding on the real engine: the same tokens as without, in fewer steps."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve import metrics, sched
from jaxserve.engine import EngineConfig, SamplingParams, drafting, speculation
from jaxserve.engine.speculation import Speculate
from jaxserve.model import random_llama
from jaxserve.replay import recording, replaying
from jaxserve.replay.recorder import Recorder
from tests.testing.caches import cache_dir
from tests.testing.engines import DRAFT_MODEL, MODEL, SCHEDULER, pair

# The drafter, and how much the model looks back: so little that its text goes round, or as it is.
ENGINES = (("ngram", 0.05), ("ngram", 1.0), ("draft", 1.0))


def idle(attention=1.0, budget=61, kind="ngram", **params):
  """The speculating engine, left idle by whoever had it before, with these parameters."""
  engine = pair(kind, attention)[1]
  assert engine.is_idle and engine.num_free_pages == SCHEDULER.cache.num_pages
  engine.set_params(sched.make_params(engine.config.scheduler, budget=budget, **params))
  engine.guard.count = 0
  return engine


@functools.lru_cache(maxsize=4096)
def expected(attention, prompt, sampling, kind="ngram"):
  """What an engine without drafts answers to one request."""
  engine = pair(kind, attention)[0]
  (done,) = engine.generate([list(prompt)], sampling)
  while engine.step():
    pass
  return done.tokens, done.finish_reason


def run_dry(engine):
  steps = []
  while events := engine.step():
    steps.append(events)
  assert engine.num_requests == 0 and engine.retraces == 0
  assert engine.num_free_pages == SCHEDULER.cache.num_pages
  return steps


REQUEST = st.fixed_dictionaries(
  dict(
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=40).map(tuple),
    max_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    stop=st.sampled_from([(), (), (17,), (3, 40)]),
    at=st.integers(0, 30),
    abort_at=st.sampled_from([None, None, None, 3, 9, 17]),
  )
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
  which=st.sampled_from(ENGINES), requests=st.lists(REQUEST, min_size=1, max_size=6),
  budget=st.integers(5, 61), threshold=st.sampled_from([0, 0, 3]),
)  # fmt: skip
def test_outputs_equal_those_without_speculation(which, requests, budget, threshold):
  """Under any budget, with preemption, aborts, stop tokens and seats short of requests."""
  kind, attention = which
  engine = idle(attention, budget, kind, long_prefill_token_threshold=threshold)
  outputs, ends, ids = {}, {}, {}
  pending, step = dict(enumerate(requests)), 0
  while pending or not engine.is_idle:
    for number in [n for n, r in pending.items() if r["at"] <= step]:
      request = pending.pop(number)
      ids[number] = engine.submit(list(request["prompt"]), sampling_of(request, number))
    for number, request in enumerate(requests):
      if request["abort_at"] == step and number in ids and engine.abort(ids[number]):
        ends[ids[number]] = "abort"
    events = engine.step()
    step += 1
    for event in events.outputs if events else ():
      outputs.setdefault(event.request_id, []).append(event.token)
      if event.finish_reason:
        ends[event.request_id] = event.finish_reason
  assert engine.retraces == 0 and engine.num_free_pages == SCHEDULER.cache.num_pages
  for number, request in enumerate(requests):
    tokens, reason = expected(attention, request["prompt"], sampling_of(request, number), kind)
    got = tuple(outputs.get(ids[number], ()))
    if ends[ids[number]] == "abort":
      assert got == tokens[: len(got)]
    else:
      assert (got, ends[ids[number]]) == (tokens, reason)


def sampling_of(request, seed):
  return SamplingParams(
    max_tokens=request["max_tokens"], temperature=request["temperature"], seed=seed,
    stop_token_ids=request["stop"],
  )  # fmt: skip


def test_a_text_that_goes_round_takes_fewer_steps():
  engine = idle(0.05)
  engine.submit([1, 2, 3], SamplingParams(max_tokens=50))
  found = sum((events.acceptance for events in run_dry(engine)), metrics.Acceptance())
  assert found.tokens_per_step > 2 and found.rate > 0.5
  assert found.accepted_tokens == sum(found.accepted_by_position) == 49 - found.decodes
  assert list(found.accepted_by_position) == sorted(found.accepted_by_position, reverse=True)


def test_a_small_model_drafts_for_a_large_one():
  """Two layers for three; rows get as many drafts as their pages of five tokens reach."""
  engine = idle(kind="draft")
  engine.warm_up()
  ids = [engine.submit(prompt, SamplingParams(max_tokens=30)) for prompt in ([1, 2, 3], [4] * 7)]
  steps = run_dry(engine)
  found = sum((events.acceptance for events in steps), metrics.Acceptance())
  assert found.tokens_per_step > 1.5 and 0.4 < found.rate < 1
  assert {part.drafts for step in steps for part in step.scheduled} == {0, 1, 2, 3}
  for prompt, request_id in zip(((1, 2, 3), (4,) * 7), ids, strict=True):
    got = [e.token for step in steps for e in step.outputs if e.request_id == request_id]
    assert tuple(got) == expected(1.0, prompt, SamplingParams(max_tokens=30), "draft")[0]


def test_a_draft_model_must_fit():
  fields = dict(
    model=MODEL, scheduler=dataclasses.replace(SCHEDULER, max_drafts=2),
    speculate=Speculate(kind="draft", k=2, model="tiny"),
  )  # fmt: skip
  for change, message in (
    (dict(vocab_size=60), "vocabulary of 60 tokens and the model one of 61"),
    (dict(max_position=60), "supports 60 tokens, less than max_model_len=61"),
  ):
    with pytest.raises(ValueError, match=message):
      EngineConfig(draft_model=dataclasses.replace(DRAFT_MODEL, **change), **fields)
  with pytest.raises(ValueError, match="draft_model=None: does not belong"):
    EngineConfig(**fields)


def test_a_draft_model_is_loaded_by_name_and_needs_the_same_tokens():
  target = random_llama.random_checkpoint()
  drafter = speculation.parse("draft:random,k=2")
  loaded = drafting.load(drafter, target, cache_dir(), "float32")
  assert loaded.config == target.config and loaded.weights.leaves
  assert drafting.load(speculation.parse("ngram:k=2"), target, cache_dir(), "float32") is None
  text = json.dumps({"model": {"vocab": {"a": 0}}})
  smaller = dataclasses.replace(target.config, vocab_size=9)
  for other in (
    dataclasses.replace(target, tokenizer_json=text), random_llama.random_checkpoint(smaller),
  ):  # fmt: skip
    with pytest.raises(ValueError, match="the tokens of random are not those of"):
      drafting.load(drafter, other, cache_dir(), "float32")


def test_without_drafts_steps_overlap_and_with_drafts_they_do_not():
  engine = idle(0.05)
  engine.submit([1, 2, 3], SamplingParams(max_tokens=40))
  steps = run_dry(engine)
  ahead = [b.dispatched_s < a.done_s for a, b in zip(steps, steps[1:], strict=False)]
  drafted = [any(part.drafts for part in step.scheduled) for step in steps]
  assert ahead[0] and any(drafted)
  assert not any(a for a, b in zip(ahead, drafted[1:], strict=True) if b)


def test_a_stop_token_inside_an_accepted_run_cuts_it():
  tokens, _ = expected(0.05, (1, 2, 3), SamplingParams(max_tokens=50))
  stop = tokens[-1]  # it has come round often
  engine = idle(0.05)
  (done,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=50, stop_token_ids=(stop,)))
  assert done.tokens == tokens[: tokens.index(stop) + 1] and done.finish_reason == "stop"
  run_dry(engine)


def test_preemption_keeps_the_tokens():
  engine = idle(0.05, budget=30)
  prompts = [tuple([i] * 25) for i in range(5)]
  ids = [engine.submit(list(prompt), SamplingParams(max_tokens=30)) for prompt in prompts]
  steps = run_dry(engine)
  assert sum(len(step.preempted) for step in steps) > 0
  assert any(part.drafts for step in steps for part in step.scheduled)
  for prompt, request_id in zip(prompts, ids, strict=True):
    got = [e.token for step in steps for e in step.outputs if e.request_id == request_id]
    assert tuple(got) == expected(0.05, prompt, SamplingParams(max_tokens=30))[0]


def test_a_run_with_drafts_is_recorded_and_replayed_bit_by_bit():
  engine, events = idle(0.05, budget=30), []
  recorder = Recorder(engine, "tiny", events.append, "5a" * 16)
  with recorder.run("drafts", "vllm_v1"):
    for i in range(5):
      hot = SamplingParams(max_tokens=25, temperature=0.5 * (i % 2), seed=i)
      recorder.submit(f"r{i}", [i, i + 1, i] * 5, hot)
    for _ in range(4):
      engine.step()
    recorder.abort("r1")
    run_dry(engine)
  record = recording.parse("".join(recording.to_line(event) for event in events))
  assert record.header.config.speculate == engine.config.speculate
  parts = [part for step in record.runs[0].steps for part in step.requests]
  assert sum(part.drafts for part in parts) > sum(part.accepted for part in parts) > 0
  assert replaying.replay(record, engine) is None
  changed = [
    recording.to_line(event).replace('"accepted":3', '"accepted":2', 1) for event in events
  ]
  found = replaying.replay(recording.parse("".join(changed)), engine)
  assert found is not None and found.field.endswith(".accepted")


def test_options_are_parsed_and_refused_by_name():
  assert speculation.parse("ngram:k=4") == Speculate(kind="ngram", k=4)
  assert speculation.parse("ngram:k=2,longest=3,shortest=1").lookup.longest == 3
  assert speculation.parse("draft:a/b:c.gguf,k=2") == Speculate(
    kind="draft", k=2, model="a/b:c.gguf"
  )
  for text, message in (
    ("eagle:k=4", "'eagle' is no drafter"), ("ngram:k=0", r"k=0: must be in \[1, 16\]"),
    ("ngram:k=x", "'k=x' is not one of"), ("draft:", "model=None"), ("ngram:n=3", "'n=3'"),
    ("ngram:shortest=5", "longest=4: must be at least shortest=5"),
  ):  # fmt: skip
    with pytest.raises(ValueError, match=message):
      speculation.parse(text)


def test_max_drafts_is_the_drafters():
  with pytest.raises(ValueError, match="max_drafts=2: must be 0"):
    EngineConfig(model=MODEL, scheduler=dataclasses.replace(SCHEDULER, max_drafts=2))


def test_useless_drafts_are_passed_over_ever_longer():
  restraint, verified = speculation.Restraint(), []
  drafts = 0
  for step in range(200):
    drafts = restraint.allow(3, drafts, 0)
    verified += [step] if drafts else []
  assert verified == [0, 2, 6, 14, 30, 62, 126, 190]
  assert restraint.allow(3, 3, 1) == 3 and restraint.allow(3, 3, 0) == 0
  assert restraint.allow(0, 0, 0) == 0 and restraint.allow(3, 0, 0) == 3


def test_acceptance_adds_up():
  one, other = metrics.Acceptance.of([(3, 2), (0, 0)]), metrics.Acceptance.of([(1, 0), (4, 4)])
  both = one + other
  assert both == metrics.Acceptance(
    decodes=4, drafts=3, draft_tokens=8, accepted_by_position=(2, 2, 1, 1)
  )
  assert (both.rate, both.tokens_per_step) == (6 / 8, 2.5)
  assert metrics.Acceptance().rate is None and metrics.Acceptance().tokens_per_step is None
  assert np.isclose(both.summary()["acceptance_rate"], 0.75)
