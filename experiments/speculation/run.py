"""Both engines in turn on every case, in one process."""

import dataclasses
import itertools
import statistics
import time

import numpy as np
from absl import logging

from experiments import provenance
from experiments.served import rounded
from experiments.speculation import config as configured
from jaxserve import metrics
from jaxserve.text.tokenizer import load_tokenizer


def decode(engine, config, case, prompts):
  """(seconds and processor seconds from the first decode on, outputs a row, drafts) of all rows."""
  ids = [
    engine.submit(prompt, configured.sampling(case, config, row))
    for row, prompt in enumerate(prompts)
  ]
  outputs, found, begin, last = {i: [] for i in ids}, metrics.Acceptance(), None, 0.0
  cpu = 0.0
  while events := engine.step():
    if begin is None and not any(part.is_prefill for part in events.scheduled):
      begin, cpu = last, time.process_time()  # the end of the last step with a prompt
    last = events.done_s
    found += events.acceptance
    for event in events.outputs:
      outputs[event.request_id].append(event.token)
  return last - begin, time.process_time() - cpu, list(outputs.values()), found


def agreement(left, right):
  """Share of the tokens before the first one that differs."""
  same = [
    next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
    for x, y in zip(left, right, strict=True)
  ]
  return sum(same) / sum(map(len, left))


def run(config):
  """One row a case: medians of the rounds."""
  plain = configured.start(config, None)
  drafting = configured.start(config, config.speculate)
  checkpoint = plain.checkpoint
  tokenizer = load_tokenizer(
    checkpoint.tokenizer_json, checkpoint.eos_token_ids, checkpoint.bos_token_id
  )
  engines = plain.engine, drafting.engine
  for engine in engines:
    engine.warm_up()
    engine.guard.count = 0
  rng, vocab = np.random.default_rng(0), checkpoint.config.vocab_size
  loads = [
    configured.prompts(case, tokenizer, checkpoint.chat_template, vocab, rng)
    for case in config.cases
  ]
  seen = {case: [] for case in config.cases}
  for number in range(config.rounds):
    for case, prompts in zip(config.cases, loads, strict=True):
      both = [decode(engine, config, case, prompts) for engine in engines]
      seen[case].append(both)
    logging.info("Round %d of %d", number + 1, config.rounds)
  rows = [row_of(case, seen[case], config) for case in config.cases]
  retraces = [engine.retraces for engine in engines]
  for engine in engines:
    engine.close()
  return [row | {"retraces": sum(retraces)} for row in rows]


def steps(config):
  """What a step without drafts costs on either engine, step by step in turn and without overlap."""
  engines = [configured.start(config, one).engine for one in (None, config.speculate)]
  for engine in engines:
    engine.warm_up()
    engine.config = dataclasses.replace(engine.config, overlap=False)
  rows = []
  for case in (one for one in config.cases if one.name == "random"):
    rng = np.random.default_rng(0)
    prompts = configured.prompts(case, None, None, engines[0].config.model.vocab_size, rng)
    for engine in engines:
      for row, prompt in enumerate(prompts):
        engine.submit(prompt, configured.sampling(case, config, row))
    seen = [[], []]
    for number in itertools.count():
      for i in (0, 1) if number % 2 else (1, 0):
        seen[i] += timed_step(engines[i])
      if all(engine.is_idle for engine in engines):
        break
    rows.append(step_row(case, *map(np.asarray, seen)))
  for engine in engines:
    engine.close()
  return rows


def timed_step(engine):
  """[(seconds, processor seconds)] of a step of plain decodes, else nothing."""
  begin, cpu = time.perf_counter(), time.process_time()
  events = engine.step()
  took = time.perf_counter() - begin, time.process_time() - cpu
  plain = events and not any(part.is_prefill or part.drafts for part in events.scheduled)
  return [took] if plain else []


def step_row(case, plain, drafting):
  """Medians of [steps, 2] seconds."""
  one, other = 1e3 * np.median(plain, axis=0), 1e3 * np.median(drafting, axis=0)
  return rounded({
    "name": "steps without drafts", "rows": case.rows, "plain_ms": one[0], "drafting_ms": other[0],
    "plain_cpu_ms": one[1], "drafting_cpu_ms": other[1], "speedup": one[0] / other[0],
    "cpu_speedup": one[1] / other[1], "steps": [len(plain), len(drafting)],
    "load_average": provenance.load_average(),
  })  # fmt: skip


def row_of(case, rounds, config):
  """What drafts did under one case."""
  ratios, cpu_ratios = ([a[i] / b[i] for a, b in rounds] for i in (0, 1))
  plain, drafting = rounds[-1]
  return rounded({
    **dataclasses.asdict(case),
    "plain_tokens_per_s": case.rows * config.outputs / statistics.median(r[0][0] for r in rounds),
    "tokens_per_s": case.rows * config.outputs / statistics.median(r[1][0] for r in rounds),
    "speedup": statistics.median(ratios),
    "speedup_range": [min(ratios), max(ratios)],
    "cpu_speedup": statistics.median(cpu_ratios),
    "same_tokens": agreement(plain[2], drafting[2]),
    **drafting[3].summary(),
    "load_average": provenance.load_average(),
  })  # fmt: skip
