"""Both engines in turn on every case, in one process."""

import dataclasses
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
