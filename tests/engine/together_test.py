"""Prefix cache, drafts, penalties, masks and scores on one engine: each as if it were alone."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxserve import sched
from jaxserve.engine import SamplingParams
from jaxserve.engine.speculation import Speculate
from tests.testing.engines import SCHEDULER, build_engine, shared_store, weights

FIELDS = dict(token_buckets=(8, 61), score_prompts=True)
SMALL = dataclasses.replace(SCHEDULER, prefix_cache=True, max_drafts=3)


@functools.cache
def engines():
  """One engine without any of it but scores, one with all; a model whose text goes round."""
  params = weights(attention=0.05)
  plain = build_engine(shared_store(), params, **FIELDS)
  everything = build_engine(
    shared_store(), params, **FIELDS, scheduler=SMALL,
    speculate=Speculate(kind="ngram", k=3, shortest=1),
  )  # fmt: skip
  return plain, everything


class Cycle:
  """Allows 10, 11, 12, 10, ... and ends after `count`."""

  def __init__(self, count):
    self.count, self.taken = count, 0

  def mask(self):
    words = np.zeros(2, np.uint32)
    words[0] = 1 << (10 + self.taken % 3)
    return words

  def accept(self, token):
    self.taken += 1
    return self.taken == self.count


KINDS = (
  {},
  {},
  {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
  {"prompt_logprobs": 2},
  {"temperature": 1.0, "seed": 7},
  {"min_tokens": 6, "stop_token_ids": (3, 17)},
  {"logit_bias": ((44, 3.0),), "bad_token_ids": (5,)},
  "cycle",
)


def requests_of(seed):
  """Prompts that begin like others, each with options of its own."""
  rng = np.random.default_rng(seed)
  stems = [rng.integers(0, 6, n).tolist() for n in (5, 20, 33)]
  made = []
  for _ in range(int(rng.integers(3, 7))):
    prompt = stems[rng.integers(3)] + rng.integers(0, 6, rng.integers(0, 8)).tolist()
    options = KINDS[rng.integers(len(KINDS))]
    length = int(rng.integers(1, 20))
    constraint = (lambda n=length: Cycle(n)) if options == "cycle" else (lambda: None)
    fields = {} if options == "cycle" else options
    most = max(length, fields.get("min_tokens", 0))
    made.append((prompt, SamplingParams(max_tokens=most, **fields), constraint))
  return made


def said(engine, requests):
  ids = [engine.submit(p, s, constraint=make()) for p, s, make in requests]
  outputs, scores, steps = {i: [] for i in ids}, {}, []
  while events := engine.step():
    steps.append(events)
    for event in events.outputs:
      outputs[event.request_id].append((event.token, event.finish_reason))
      if event.prompt_scores is not None:
        scores[event.request_id] = event.prompt_scores.logprobs
  assert engine.retraces == 0 and engine.num_free_pages == SCHEDULER.cache.num_pages
  return [outputs[i] for i in ids], [scores.get(i) for i in ids], steps


@pytest.mark.parametrize("budget", [61, 9])
def test_outputs_are_those_of_a_plain_engine_one_by_one(budget):
  plain, everything = engines()
  everything.set_params(sched.make_params(SMALL, budget=budget))
  everything.guard.count = plain.guard.count = 0
  accepted = cached = preempted = 0
  for seed in range(12):
    requests = requests_of(100 * budget + seed)
    outputs, scores, steps = said(everything, requests)
    parts = [part for events in steps for part in events.scheduled]
    accepted += sum(part.accepted for part in parts)
    cached += sum(part.cached for part in parts)
    preempted += sum(len(events.preempted) for events in steps)
    for number, request in enumerate(requests):
      (alone,), (alone_scores,), _ = said(plain, [request])
      assert outputs[number] == alone, (seed, number, request)
      assert (scores[number] is None) == (alone_scores is None)
      if alone_scores is not None:
        np.testing.assert_allclose(scores[number], alone_scores, atol=1e-4)
  assert accepted > 50 and cached > 100 and preempted > 0
