"""A workload on the engine, open loop, in wall-clock time."""

import collections

import numpy as np

from jaxserve import metrics
from jaxserve.engine import QueueFullError, SamplingParams, clock


def serve(engine, load, seed=0):
  """Times of every request, in seconds since the first was sent."""
  rng, vocab = np.random.default_rng(seed), engine.config.model.vocab_size
  prompts = [rng.integers(0, vocab, size).tolist() for size in load.num_prompt]
  pending, numbers = collections.deque(range(len(load))), {}
  times = [[] for _ in range(len(load))]
  begin = clock.now()
  while pending or not engine.is_idle:
    while pending and begin + load.arrival_s[pending[0]] <= clock.now():
      number = pending[0]
      options = SamplingParams(max_tokens=int(load.num_output[number]), ignore_eos=True)
      try:
        numbers[engine.submit(prompts[number], options)] = number
      except QueueFullError:
        break  # held back, in order, as in the simulator
      pending.popleft()
    events = engine.step()
    if events is None:
      if pending:
        clock.sleep_until(begin + load.arrival_s[pending[0]])
      continue
    for event in events.outputs:
      times[numbers[event.request_id]].append(events.done_s - begin)
  return [
    metrics.RequestTimes(
      request_id=str(i), arrival_s=float(load.arrival_s[i]), token_times_s=np.asarray(times[i]),
      num_prompt=int(load.num_prompt[i]), finish_reason="length",
    )
    for i in range(len(load))
  ]  # fmt: skip
