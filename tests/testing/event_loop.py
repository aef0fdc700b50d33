"""The simulator as a plain Python event loop over the sequential oracle; time is in ns."""

import dataclasses

from tests.testing import oracle
from tests.testing.policy_oracles import ORACLES

NANOS = 10**9


@dataclasses.dataclass
class Served:
  started: dict[int, int]  # by request
  tokens: dict[int, list[int]]
  steps: int = 0
  computed: int = 0
  preemptions: int = 0
  busy: int = 0


def serve(load, config, params: oracle.Params, step_ns, overlap: bool) -> Served:
  """step_ns: tokens of a step -> nanoseconds."""
  server, out = ORACLES[config.policy](config), Served({}, {i: [] for i in range(len(load))})
  arrivals = [round(t * NANOS) for t in load.arrival_s]
  now = free_at = number = 0
  pending = None
  while number < len(load) or server.requests:
    if not server.requests:
      now = max(now, arrivals[number])
    while number < len(load) and arrivals[number] <= now:
      total = min(int(load.num_prompt[number] + load.num_output[number]), config.max_model_len)
      if server.submit(int(load.num_prompt[number]), total, int(load.priority[number])) is None:
        break
      number += 1
    flight, step = None, server.schedule(params)
    out.preemptions += len(step.preempted)
    names = {r.slot: r.arrival for r in server.requests}
    if step.tokens:
      tokens = sum(step.tokens.values())
      begin = max(free_at, now)
      free_at = begin + step_ns(tokens)
      flight = step, free_at
      out.steps, out.computed = out.steps + 1, out.computed + tokens
      out.busy += step_ns(tokens)
      for slot in step.tokens:
        out.started.setdefault(names[slot], begin)
    pending, done = (flight, pending) if overlap else (None, flight)
    if done:
      step, now = done
      for r in step.sampled:
        out.tokens[r.arrival].append(now)
      server.commit(step, set())
  return out
