"""The engine end to end on a tiny model: tokens, chunking, stops, aborts, errors, no compiles."""

import dataclasses

import numpy as np
import pytest

from jaxserve import sched
from jaxserve.engine import QueueFullError, SamplingParams
from tests.testing.engines import MODEL, SCHEDULER, idle_engine, plain_greedy, tiny_engine, weights

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, MODEL.vocab_size, n).tolist() for n in (5, 30, 47, 1, 17, 9, 22, 3)]
TWELVE = SamplingParams(max_tokens=12)


def run_dry(engine):
  """All steps until idle."""
  steps = []
  while events := engine.step():
    steps.append(events)
  assert engine.num_requests == 0 and engine.retraces == 0
  assert engine.num_free_pages == SCHEDULER.cache.num_pages
  return steps


def tokens_of(steps, request_id):
  return [e.token for s in steps for e in s.outputs if e.request_id == request_id]


@pytest.fixture(scope="module")
def expected():
  return [plain_greedy(weights(), MODEL, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize(
  "params",
  [dict(budget=61), dict(budget=24), dict(budget=7), dict(budget=61, chunked_prefill=False),
   dict(budget=5), dict(budget=61, long_prefill_token_threshold=3), dict(budget=9, max_num_seqs=2)],
  ids=str,
)  # fmt: skip
def test_greedy_tokens_equal_an_uncached_forward_whatever_the_chunks(expected, params):
  engine = idle_engine(**params)
  done = engine.generate(PROMPTS, TWELVE)
  assert [d.tokens for d in done] == expected
  assert {d.finish_reason for d in done} == {"length"}
  assert engine.retraces == 0


def test_one_step_of_overlap_and_none_give_the_same_tokens(expected):
  engine = tiny_engine(overlap=False)
  engine.guard.count = 0
  assert [d.tokens for d in engine.generate(PROMPTS, TWELVE)] == expected
  assert engine.retraces == 0
  engine.close()


def test_step_is_dispatched_before_the_tokens_of_the_one_before_are_read():
  engine = idle_engine()
  engine.submit(PROMPTS[0], TWELVE)
  steps = run_dry(engine)
  overlapped = [b.dispatched_s < a.done_s for a, b in zip(steps, steps[1:], strict=False)]
  assert all(overlapped) and len(overlapped) == 11


def test_preemption_keeps_the_tokens(expected):
  """23 pages cannot hold five growing requests: some are preempted and replayed."""
  engine = idle_engine(budget=30)
  ids = [engine.submit(PROMPTS[i], SamplingParams(max_tokens=25)) for i in (2, 1, 4, 6, 5)]
  steps = run_dry(engine)
  assert sum(len(s.preempted) for s in steps) > 0
  for request_id, i in zip(ids, (2, 1, 4, 6, 5), strict=True):
    assert tokens_of(steps, request_id)[:12] == list(expected[i])


def test_random_load_never_compiles_and_answers_everyone_once():
  engine, rng = idle_engine(), np.random.default_rng(1)
  finished, live, aborted = {}, set(), set()
  for _ in range(150):
    if rng.random() < 0.5 and engine.num_requests < SCHEDULER.max_requests:
      prompt = rng.integers(0, MODEL.vocab_size, int(rng.integers(1, 40))).tolist()
      sampling = SamplingParams(
        max_tokens=int(rng.integers(1, 12)), temperature=float(rng.choice([0.0, 1.0])),
        top_k=int(rng.integers(0, 5)), seed=int(rng.integers(100)),
      )  # fmt: skip
      live.add(engine.submit(prompt, sampling))
    if live and rng.random() < 0.1:
      victim = int(rng.choice(sorted(live)))
      assert engine.abort(victim).finish_reason == "abort"
      live.remove(victim)
      aborted.add(victim)
    events = engine.step()
    for event in events.outputs if events else ():
      assert event.request_id in live
      if event.finish_reason:
        finished[event.request_id] = event.finish_reason
        live.remove(event.request_id)
  for step in run_dry(engine):
    for event in step.outputs:
      if event.finish_reason:
        finished[event.request_id] = event.finish_reason
        live.remove(event.request_id)
  assert not live and not (finished.keys() & aborted) and len(finished) > 20 and aborted


def test_end_of_sequence_stops_one_step_late_without_a_trace(expected):
  """The step already in flight for a stopped request yields nothing, and its pages return."""
  stop = expected[0][4]
  first = expected[0].index(stop)
  engine = idle_engine()
  ended = engine.submit(PROMPTS[0], SamplingParams(max_tokens=30, stop_token_ids=(stop,)))
  other = engine.submit(PROMPTS[1], TWELVE)
  steps = run_dry(engine)
  assert tokens_of(steps, ended) == list(expected[0][: first + 1])
  assert tokens_of(steps, other) == list(expected[1])
  reasons = {e.request_id: e.finish_reason for s in steps for e in s.outputs if e.finish_reason}
  assert reasons == {ended: "stop", other: "length"}


def test_max_tokens_one_finishes_at_its_prefill():
  engine = idle_engine(budget=8)
  busy = engine.submit(PROMPTS[3], SamplingParams(max_tokens=20))
  one = engine.submit(PROMPTS[1], SamplingParams(max_tokens=1))
  steps = run_dry(engine)
  assert len(tokens_of(steps, one)) == 1 and len(tokens_of(steps, busy)) == 20


def test_max_model_len_ends_a_request_without_max_tokens():
  engine = idle_engine()
  request_id = engine.submit(PROMPTS[2], SamplingParams(max_tokens=None))
  assert len(tokens_of(run_dry(engine), request_id)) == SCHEDULER.max_model_len - len(PROMPTS[2])


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_abort_in_any_state_frees_everything_and_spares_the_others(expected, steps_before):
  engine = idle_engine(budget=11)
  kept, gone = engine.submit(PROMPTS[4], TWELVE), engine.submit(PROMPTS[2], TWELVE)
  before = [engine.step() for _ in range(steps_before)]
  assert engine.abort(gone).finish_reason == "abort"
  assert engine.abort(gone) is None and engine.abort(10**9) is None
  # The freed slot is taken by somebody else while the old step is in flight.
  new = engine.submit(PROMPTS[0], TWELVE)
  steps = before + run_dry(engine)
  assert tokens_of(steps, kept) == list(expected[4])
  assert tokens_of(steps, new) == list(expected[0])


def test_sampled_text_depends_on_its_seed_and_on_nothing_else():
  engine = idle_engine()
  hot = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=7)
  alone = engine.generate([PROMPTS[1]], hot)[0].tokens
  engine.set_params(idle_engine(budget=7).params)
  crowd = engine.generate([PROMPTS[2], PROMPTS[1], PROMPTS[0]], hot)[1].tokens
  other = engine.generate([PROMPTS[1]], SamplingParams(max_tokens=12, temperature=1.0, seed=8))
  assert alone == crowd != other[0].tokens
  unseeded = SamplingParams(max_tokens=12, temperature=1.0)
  first, second = engine.generate([PROMPTS[1], PROMPTS[1]], unseeded)
  assert first.tokens != second.tokens


def test_logprobs_are_those_of_the_plain_model():
  from tests.testing.engines import plain_logits

  engine = idle_engine()
  engine.submit(PROMPTS[4], TWELVE)
  event = engine.step().outputs[0]
  logits = plain_logits(weights(), MODEL, PROMPTS[4])[-1]
  order = np.argsort(-logits)[: len(event.top_ids)]
  assert list(event.top_ids) == order.tolist()
  np.testing.assert_allclose(event.top_logits, logits[order], atol=1e-4)
  logprob = logits[event.token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
  assert event.logprob == pytest.approx(logprob, abs=1e-4)
  run_dry(engine)


BAD_REQUESTS = {
  "empty": ([], TWELVE, "prompt: is empty"),
  "too_long": ([1] * 61, TWELVE, "max_model_len=61"),
  "negative_id": ([1, -1], TWELVE, r"prompt\[1\]=-1"),
  "large_id": ([61], TWELVE, r"prompt\[0\]=61.*\[0, 61\)"),
  "no_tokens": ([1], SamplingParams(max_tokens=0), "max_tokens=0"),
  "bad_stop": ([1], SamplingParams(stop_token_ids=(99,)), "=99"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_leaves_nothing_behind(name):
  prompt, sampling, message = BAD_REQUESTS[name]
  engine = idle_engine()
  with pytest.raises(ValueError, match=message):
    engine.submit(prompt, sampling)
  assert engine.num_requests == 0 and engine.step() is None


@pytest.mark.parametrize(
  "fields", [dict(temperature=-0.1), dict(temperature=float("nan")), dict(temperature=float("inf")),
             dict(top_p=1.1), dict(top_p=-0.1), dict(top_k=-2), dict(min_p=2.0)],
)  # fmt: skip
def test_a_sampling_option_out_of_range_is_named(fields):
  (name,) = fields
  with pytest.raises(ValueError, match=f"{name}="):
    SamplingParams(**fields)


def test_a_full_queue_refuses_and_serves_on():
  engine = idle_engine()
  ids = [engine.submit([1], TWELVE) for _ in range(SCHEDULER.max_requests)]
  with pytest.raises(QueueFullError, match="7 request slots"):
    engine.submit([1], TWELVE)
  steps = run_dry(engine)
  assert all(len(tokens_of(steps, i)) == 12 for i in ids)


def test_priority_needs_a_scheduler_that_orders_by_it():
  with pytest.raises(ValueError, match="priority=1"):
    idle_engine().submit([1], TWELVE, priority=1)


def test_warm_up_changes_nothing_and_compiles_nothing(expected):
  engine = idle_engine()
  engine.warm_up()
  engine.warm_up(most_tokens=8)
  assert [d.tokens for d in engine.generate(PROMPTS, TWELVE)] == expected
  assert engine.retraces == 0
  engine.submit([1], TWELVE)
  with pytest.raises(RuntimeError, match="1 requests are being served"):
    engine.warm_up()
  run_dry(engine)


@pytest.mark.parametrize("policy", ["sglang", "sglang_mixed"])
def test_a_policy_may_sit_steps_out(expected, policy):
  engine = tiny_engine(other_policies=("sglang", "sglang_mixed"))
  engine.guard.count = 0
  config = dataclasses.replace(engine.config.scheduler, policy=policy)
  interval = {"prefill_decode_interval": 3}  # and nobody decodes between the chunks of PROMPTS[2]
  engine.set_policy(policy, sched.make_params(config, budget=24, policy=interval))
  assert engine.generate(PROMPTS[2:3], TWELVE)[0].tokens == expected[2]
  assert [d.tokens for d in engine.generate(PROMPTS, TWELVE)] == expected
  assert engine.retraces == 0 and engine.num_free_pages == SCHEDULER.cache.num_pages


def test_an_idle_engine_changes_policy_without_compiling():
  engine = tiny_engine(other_policies=("sarathi", "prefill_first"))
  engine.guard.count = 0
  prompts, replies = [[3, 1, 4, 1, 5] * 4, [2, 7], [1, 8, 2, 8]], set()
  for policy in ("vllm_v1", "sarathi", "prefill_first"):
    engine.set_policy(policy, sched.make_params(engine.config.scheduler))
    assert engine.config.scheduler.policy == policy
    replies.add(tuple(done.tokens for done in engine.generate(prompts)))
    assert engine.num_free_pages == SCHEDULER.cache.num_pages
  assert len(replies) == 1 and engine.retraces == 0
  with pytest.raises(ValueError, match="policy='orca': the engine was built for"):
    engine.set_policy("orca", engine.params)
  engine.submit([1, 2])
  with pytest.raises(RuntimeError, match="1 requests are being served"):
    engine.set_policy("vllm_v1", engine.params)
  while engine.step():
    pass
