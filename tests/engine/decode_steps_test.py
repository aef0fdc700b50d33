"""Decodes that run on the device without the host between them: as if the host had been there."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxserve import sched
from jaxserve.engine import SamplingParams
from jaxserve.engine.speculation import Speculate
from tests.testing.engines import EOS, SCHEDULER, build_engine, shared_store

STEPS = 4
FIELDS = dict(token_buckets=(8, 61), eos_token_ids=(EOS,))


@functools.cache
def engines(cached: bool):
  """One that steps alone and one that runs several at once."""
  fields = FIELDS | {"scheduler": dataclasses.replace(SCHEDULER, prefix_cache=cached)}
  one = build_engine(shared_store(), **fields)
  several = build_engine(shared_store(), **fields, decode_steps=STEPS)
  several.warm_up()
  return one, several


def random_load(seed):
  """(after how many steps, prompt, options, steps until it is aborted or None)."""
  rng = np.random.default_rng(seed)
  kinds = (
    {}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}, {"min_tokens": 3},
    {"stop_token_ids": (3, 9, 30)}, {"ignore_eos": True},
  )  # fmt: skip
  load = []
  for _ in range(int(rng.integers(2, 12))):
    options = SamplingParams(max_tokens=int(rng.integers(3, 25)), **kinds[rng.integers(len(kinds))])
    prompt = rng.integers(0, 61, rng.integers(1, 30)).tolist()
    abort = int(rng.integers(1, 12)) if rng.random() < 0.15 else None
    load.append((int(rng.integers(0, 30)), prompt, options, abort))
  return sorted(load, key=lambda x: x[0])


def run(engine, load):
  """(tokens and end of every request that was not aborted, steps)."""
  arrivals, ids, aborts, said, steps = list(load), {}, {}, {}, []
  while arrivals or not engine.is_idle:
    while arrivals and (arrivals[0][0] <= len(steps) or engine.is_idle):
      if engine.num_requests == SCHEDULER.max_requests:
        break
      _, prompt, options, abort = arrivals.pop(0)
      number = engine.submit(prompt, options)
      ids[number] = len(ids)
      said[ids[number]] = []
      if abort is not None:
        aborts[number] = len(steps) + abort
    for number in [n for n, at in aborts.items() if at <= len(steps)]:
      engine.abort(number)
      del aborts[number], said[ids[number]]
    events = engine.step()
    if events is None:
      continue
    steps.append(events)
    for event in events.outputs:
      if ids[event.request_id] in said:
        said[ids[event.request_id]].append((event.token, event.finish_reason))
      if event.finish_reason:
        aborts.pop(event.request_id, None)
  return said, steps


@pytest.mark.parametrize("cached", [False, True])
def test_tokens_and_ends_are_those_of_single_steps(cached):
  one, several = engines(cached)
  bursts = 0
  for seed in range(20):
    load = random_load(seed)
    # Who is aborted when depends on how outputs come; the others must not notice.
    without = [(at, prompt, options, None) for at, prompt, options, _ in load]
    expected, _ = run(one, without)
    for mine in (without, load):
      found, steps = run(several, mine)
      assert found.items() <= expected.items()
      assert len(found) == len(load) or mine is load
      assert [events.step - steps[0].step for events in steps] == list(range(len(steps)))
      assert several.num_free_pages == SCHEDULER.cache.num_pages
      bursts += sum(
        a.dispatched_s == b.dispatched_s for a, b in zip(steps, steps[1:], strict=False)
      )
  assert bursts > 100 and several.retraces == 0


def test_a_step_schedules_what_a_single_one_would():
  one, several = engines(False)
  load = [(0, [1, 2, 3], SamplingParams(max_tokens=n, ignore_eos=True), None) for n in (9, 17, 5)]
  _, alone = run(one, load)
  _, together = run(several, load)
  of = lambda steps: [[(s.start, s.tokens, s.new_pages) for s in e.scheduled] for e in steps]
  assert of(alone) == of(together)
  assert len({e.dispatched_s for e in together}) < len({e.dispatched_s for e in alone}) / 2


def test_the_device_stops_when_everybody_has():
  _, several = engines(False)
  prompt = [5, 6, 7]
  outputs = several.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True))[0].tokens
  stop = next(token for i, token in enumerate(outputs) if i > 1 and token not in outputs[:i])
  place = outputs.index(stop)
  several.submit(prompt, SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,)))
  steps = []
  while events := several.step():
    steps.append(events)
  # What is dispatched ahead in the same loop is not run; nor is the loop after it.
  assert len(steps) == place + 1
  assert [e.outputs[0].finish_reason for e in steps] == [None] * place + ["stop"]
  assert several.num_free_pages == SCHEDULER.cache.num_pages


def test_a_newcomer_waits_for_fewer_than_two_loops():
  _, several = engines(False)
  several.submit([1, 2], SamplingParams(max_tokens=50, ignore_eos=True))
  for _ in range(7):
    several.step()
  late = several.submit([3, 4], SamplingParams(max_tokens=2, ignore_eos=True))
  waited = 0
  while late not in {s.request_id for s in several.step().scheduled}:
    waited += 1
  assert waited < 2 * STEPS
  while several.step():
    pass


def test_a_pool_that_runs_dry_and_few_seats():
  one, several = engines(False)
  load = [(0, [i, 2, 3], SamplingParams(max_tokens=35, ignore_eos=True), None) for i in range(5)]
  expected, _ = run(one, load)
  found, steps = run(several, load)
  assert found == expected and any(events.preempted for events in steps)
  several.set_params(sched.make_params(SCHEDULER, budget=5, max_num_seqs=2))
  assert run(several, load)[0] == expected
  several.set_params(sched.make_params(SCHEDULER))
  assert several.num_free_pages == SCHEDULER.cache.num_pages


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"decode_steps": 0}, "decode_steps=0"),
    (
      {
        "decode_steps": 2, "speculate": Speculate(kind="ngram", k=3),
        "scheduler": dataclasses.replace(SCHEDULER, max_drafts=3),
      },
      "leave out speculate",
    ),
  ],
)  # fmt: skip
def test_what_does_not_go(fields, message):
  with pytest.raises(ValueError, match=message):
    build_engine(shared_store(), **(FIELDS | fields))
