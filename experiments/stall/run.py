"""The streams and the prompt in virtual time, under every budget and unchunked."""

import dataclasses

import numpy as np

from experiments import case, served
from experiments.store import workload_digest
from jaxserve import cost, sched, sim
from jaxserve.workload import Workload


def load_of(config, own_prompt):
  """The streams at once at 0 s, each with a prompt of its own; then the long prompt, the last."""
  count = config.decoders
  return Workload(
    arrival_s=np.append(np.zeros(count), config.arrives_s),
    num_prompt=np.append(np.full(count, own_prompt), config.prompt),
    num_output=np.append(np.full(count, config.outputs), config.long_outputs),
  )


def simulate(config, params, own_prompt):
  scheduler = config.server.scheduler(budget=config.server.length)
  load = load_of(config, own_prompt)
  return sim.simulate(load, scheduler, params, config.server.step_time())


def params_of(config, budget):
  """Of a budget; None: unchunked, with a budget that holds any prompt."""
  scheduler = config.server.scheduler(budget=config.server.length)
  if budget is None:
    return sched.make_params(scheduler, budget=config.server.length, chunked_prefill=False)
  return sched.make_params(scheduler, budget=budget)


def streams(config, result):
  """Per stream, its token times."""
  return [request.token_times_s for request in result.requests()[: config.decoders]]


def at_context(config, params):
  """The result with the streams' prompts so long that they have `context` tokens at the arrival."""
  own = config.context
  for _ in range(3):
    result = simulate(config, params, own)
    made = np.mean([np.sum(times < config.arrives_s) for times in streams(config, result)])
    aim = max(int(round(config.context - made)), 1)
    if aim == own:
      break
    own = aim
  return result


def run(config, store):
  budgets = [*config.budgets, None]
  settings = [{"budget": budget, "chunked": budget is not None} for budget in budgets]
  fixed = dataclasses.asdict(config) | {"load": workload_digest(load_of(config, config.context))}
  fixed.pop("budgets")
  return store.measure("Simulating budgets", fixed, settings, lambda s: measure(config, s))


def measure(config, setting):
  params = params_of(config, setting["budget"])
  result = at_context(config, params)
  times = streams(config, result)
  begin, end = config.arrives_s, float(result.token_s[result.first_output[-1]])
  gaps = np.concatenate([np.diff(one) for one in times])
  ends = np.concatenate([one[1:] for one in times])
  during = (ends > begin) & (ends <= end)
  before = (ends <= begin) & (ends > begin - 0.3)
  made = sum(int(np.sum((one > begin) & (one <= end))) for one in times)
  row = {
    "decode_ms": 1e3 * np.median(gaps[before]),
    "longest_gap_ms": 1e3 * gaps[during].max(),
    "p50_gap_during_ms": 1e3 * np.median(gaps[during]),
    "gaps_during": int(during.sum()) // config.decoders,
    "long_ttft_ms": 1e3 * (end - begin),
    "tokens_during_per_s": made / (end - begin),
  }
  row |= {"spike": row["longest_gap_ms"] / row["decode_ms"]} | predicted(config, setting["budget"])
  return served.rounded({key: value if isinstance(value, int) else float(value)
                         for key, value in row.items()})  # fmt: skip


def predicted(config, budget):
  """The same by the arithmetic of jaxserve.cost, without a simulation."""
  model = case.model(config.server.model)
  hardware = case.device(config.server.hardware).hardware
  rows, resident = config.decoders, config.decoders * config.context
  chunk = config.prompt if budget is None else budget - rows
  starts = range(0, config.prompt, chunk)
  seconds = [
    float(
      cost.chunk_seconds(
        model, hardware, min(chunk, config.prompt - at), at, rows=rows, resident=resident
      )
    )
    for at in starts
  ]
  return {
    "predicted_decode_ms": 1e3 * float(cost.decode_seconds(model, hardware, rows, config.context)),
    "predicted_longest_ms": 1e3 * max(seconds),
    "predicted_ttft_ms": 1e3 * sum(seconds),
    "chunks": len(seconds),
  }


def timeline(config, budget):
  """Tokens of all streams after the prompt's arrival: (seconds, count)."""
  result = at_context(config, params_of(config, budget))
  times = np.sort(np.concatenate(streams(config, result))) - config.arrives_s
  keep = times > -0.1
  return times[keep], np.arange(1, keep.sum() + 1)
