"""Options of single requests on the engine: penalties, minima, masks, scores of prompts."""

import math

import numpy as np
import pytest

from jaxserve import sched
from jaxserve.engine import SamplingParams
from tests.testing.engines import MODEL, SCHEDULER, plain_greedy, plain_logits, tiny_engine, weights

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, MODEL.vocab_size, n).tolist() for n in (5, 30, 47, 1, 17)]


def engine_at(budget=61):
  engine = tiny_engine(score_prompts=True)
  assert engine.num_requests == 0 and engine.step() is None
  engine.set_params(sched.make_params(SCHEDULER, budget=budget))
  engine.guard.count = 0
  return engine


def run(engine, requests):
  """Events of each request, together on one engine; (prompt, sampling[, constraint])."""
  ids = [engine.submit(r[0], r[1], constraint=r[2] if len(r) > 2 else None) for r in requests]
  events = {request_id: [] for request_id in ids}
  preempted = 0
  while step := engine.step():
    preempted += len(step.preempted)
    for event in step.outputs:
      events[event.request_id].append(event)
  assert engine.retraces == 0 and engine.num_free_pages == SCHEDULER.cache.num_pages
  return [events[request_id] for request_id in ids], preempted


def tokens(events):
  return tuple(event.token for event in events)


def penalized(prompt, count, presence=0.0, frequency=0.0, repetition=1.0):
  known = list(prompt)
  for _ in range(count):
    logits = plain_logits(weights(), MODEL, known)[-1]
    outputs = known[len(prompt) :]
    for token in set(known):
      logits[token] *= 1 / repetition if logits[token] > 0 else repetition
    for token in set(outputs):
      logits[token] -= frequency * outputs.count(token) + presence
    known.append(int(logits.argmax()))
  return tuple(known[len(prompt) :])


def test_penalties_follow_the_outputs_whatever_the_chunks_and_the_neighbours():
  penalties = {"presence": 0.4, "frequency": 0.5, "repetition": 1.3}
  sampling = SamplingParams(max_tokens=12, **{f"{k}_penalty": v for k, v in penalties.items()})
  expected = [penalized(prompt, 12, **penalties) for prompt in PROMPTS]
  plain = [plain_greedy(weights(), MODEL, prompt, 12) for prompt in PROMPTS]
  assert expected != plain
  for budget in (61, 7):
    both = [(prompt, s) for prompt in PROMPTS for s in (sampling,)] + [
      (PROMPTS[0], SamplingParams(max_tokens=12))
    ]
    events, _ = run(engine_at(budget), both)
    assert [tokens(e) for e in events] == [*expected, plain[0]]


def test_penalties_survive_a_preemption():
  sampling = SamplingParams(max_tokens=25, frequency_penalty=0.8)
  chosen = [PROMPTS[i] for i in (2, 1, 4, 1, 0)]
  events, preempted = run(engine_at(30), [(prompt, sampling) for prompt in chosen])
  assert preempted > 0
  expected = [penalized(prompt, 12, frequency=0.8) for prompt in chosen]
  assert [tokens(e)[:12] for e in events] == expected


def test_min_tokens_holds_stop_tokens_back_and_the_length_still_ends():
  engine = engine_at()
  greedy = plain_greedy(weights(), MODEL, PROMPTS[0], 12)
  stop = greedy[2]
  ask = lambda **f: SamplingParams(stop_token_ids=(stop,), **f)
  (plain, held, short), _ = run(
    engine,
    [(PROMPTS[0], ask(max_tokens=12)), (PROMPTS[0], ask(max_tokens=12, min_tokens=12)),
     (PROMPTS[0], ask(max_tokens=2, min_tokens=9))],
  )  # fmt: skip
  assert plain[-1].token == stop and plain[-1].finish_reason == "stop" and len(plain) <= 3
  assert len(held) == 12 and stop not in tokens(held)
  assert len(short) == 2 and short[-1].finish_reason == "length"


def test_bias_and_masks():
  ask = lambda **f: SamplingParams(max_tokens=6, **f)
  engine = engine_at()
  best = plain_greedy(weights(), MODEL, PROMPTS[1], 6)
  (forced, only, without, hot), _ = run(
    engine,
    [(PROMPTS[1], ask(logit_bias=((44, 100.0),))), (PROMPTS[1], ask(allowed_token_ids=(7, 60))),
     (PROMPTS[1], ask(bad_token_ids=(best[0],))),
     (PROMPTS[1], ask(allowed_token_ids=(7, 60), temperature=2.0, seed=1, num_top=20))],
  )  # fmt: skip
  assert set(tokens(forced)) == {44} and set(tokens(only)) <= {7, 60}
  assert tokens(without)[0] != best[0] and best[0] not in tokens(without)
  assert set(tokens(hot)) == {7, 60} and len(hot[0].top_ids) == 20 and len(only[0].top_ids) == 8
  # What is told of a token is what the model said of it, edited or not.
  logits = plain_logits(weights(), MODEL, PROMPTS[1])[-1]
  logprob = logits[44] - np.log(np.exp(logits).sum())
  assert forced[0].logprob == pytest.approx(logprob, abs=1e-4)
  assert list(hot[0].top_ids) == np.argsort(-logits)[:20].tolist()


class Cycle:
  """Allows 10, 11, 12, 10, ... and ends after `count`."""

  def __init__(self, count):
    self.count, self.taken, self.masks = count, [], 0

  def mask(self):
    self.masks += 1
    words = np.zeros(2, np.uint32)
    words[0] = 1 << (10 + len(self.taken) % 3)
    return words

  def accept(self, token):
    self.taken.append(token)
    return len(self.taken) == self.count


def test_a_constraint_decides_every_token_and_the_end():
  first, second, plain = Cycle(7), Cycle(4), SamplingParams(max_tokens=12)
  (a, b, c), _ = run(
    engine_at(20),
    [(PROMPTS[2], plain, first), (PROMPTS[0], SamplingParams(temperature=1.0), second),
     (PROMPTS[1], plain)],
  )  # fmt: skip
  assert tokens(a) == (10, 11, 12, 10, 11, 12, 10) == tuple(first.taken)
  assert tokens(b) == (10, 11, 12, 10) and b[-1].finish_reason == a[-1].finish_reason == "stop"
  assert first.masks == 7  # never asked ahead of the last token
  assert tokens(c) == plain_greedy(weights(), MODEL, PROMPTS[1], 12)


def scores_of(prompt):
  logits = plain_logits(weights(), MODEL, prompt)[:-1]
  logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
  return logprobs, logprobs[np.arange(len(prompt) - 1), prompt[1:]]


@pytest.mark.parametrize("budget", [61, 24, 7])
def test_prompt_scores_are_those_of_an_uncached_forward(budget):
  ask = SamplingParams(max_tokens=3, prompt_logprobs=5)
  others = SamplingParams(max_tokens=3)
  events, _ = run(engine_at(budget), [(p, ask) for p in PROMPTS] + [(PROMPTS[2], others)])
  assert events[-1][0].prompt_scores is None
  for prompt, own in zip(PROMPTS, events, strict=False):
    scores = own[0].prompt_scores
    assert scores.logprobs.shape == (len(prompt) - 1,)
    assert all(event.prompt_scores is None for event in own[1:])
    if len(prompt) == 1:
      continue
    every, mine = scores_of(prompt)
    np.testing.assert_allclose(scores.logprobs, mine, atol=2e-4)
    np.testing.assert_array_equal(scores.ranks, 1 + (every > mine[:, None]).sum(1))
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-every, axis=1)[:, :5])
    np.testing.assert_allclose(scores.top_logprobs, -np.sort(-every, axis=1)[:, :5], atol=2e-4)


def test_prompt_scores_survive_a_preemption_and_come_once():
  ask = SamplingParams(max_tokens=25, prompt_logprobs=0)
  chosen = [PROMPTS[i] for i in (2, 1, 4, 1, 0)]
  events, preempted = run(engine_at(30), [(prompt, ask) for prompt in chosen])
  assert preempted > 0
  for prompt, own in zip(chosen, events, strict=True):
    np.testing.assert_allclose(own[0].prompt_scores.logprobs, scores_of(prompt)[1], atol=2e-4)
    assert own[0].prompt_scores.top_ids.shape == (len(prompt) - 1, 0)


def test_an_engine_without_scores_says_so():
  with pytest.raises(ValueError, match="prompt_logprobs=1: this engine was built without"):
    tiny_engine().check([1, 2], SamplingParams(prompt_logprobs=1))


def test_a_row_that_is_no_number_ends_its_request_and_no_other(monkeypatch):
  from jaxserve.engine import in_flight

  engine = engine_at()
  event_of = in_flight._token_event

  def broken(request, token, logprob, *more):
    logprob = math.nan if request.prompt == tuple(PROMPTS[0]) else logprob
    return event_of(request, token, logprob, *more)

  monkeypatch.setattr(in_flight, "_token_event", broken)
  twelve = SamplingParams(max_tokens=12)
  (bad, good), _ = run(engine, [(PROMPTS[0], twelve), (PROMPTS[1], twelve)])
  assert len(bad) == 1 and bad[0].finish_reason == "error"
  assert tokens(good) == plain_greedy(weights(), MODEL, PROMPTS[1], 12)


def test_abort_while_preempted():
  """Who leaves while its pages are somebody else's frees nothing twice."""
  engine = engine_at(30)
  sampling = SamplingParams(max_tokens=25)
  ids = [engine.submit(PROMPTS[i], sampling) for i in (2, 1, 4, 1, 0)]
  preempted = ()
  while not preempted:
    preempted = engine.step().preempted
  gone = preempted[0]
  assert engine.abort(gone).finish_reason == "abort"
  alive = {request_id: 0 for request_id in ids if request_id != gone}
  while step := engine.step():
    for event in step.outputs:
      assert event.request_id != gone
      alive[event.request_id] += event.finish_reason is not None
  assert set(alive.values()) == {1}
  assert engine.num_free_pages == SCHEDULER.cache.num_pages and engine.retraces == 0
