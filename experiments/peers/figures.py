"""What a worker's times say, the same for every engine. Seconds, unless a name says otherwise."""

import itertools
import statistics

import numpy as np

_SETTLED = 4  # outputs of every decoder before the clock of a decode runs


def prompt(seed, length, vocab_size):
  """Random token ids; the first three of a vocabulary tend to be marks and are left out."""
  return np.random.default_rng(seed).integers(3, vocab_size, length).tolist()


def requests(case, config, outputs, vocab_size, seed):
  """What a case sends to an engine; decoders have so many outputs."""
  make = lambda number, length: prompt((seed, number), length, vocab_size)
  if case.kind in ("prefill", "start"):
    return [{"prompt": make(0, case.prompt), "tokens": 1, "after": 0}]
  sent = [
    {"prompt": make(row, config.context), "tokens": outputs, "after": 0} for row in range(case.rows)
  ]
  if case.kind == "stall":
    sent.append({"prompt": make(case.rows, case.prompt), "tokens": 1, "after": config.arrival})
  return sent


def figures(case, answered):
  """Named numbers of one run of a case."""
  if case.kind == "decode":
    return decode(answered)
  if case.kind == "prefill":
    (only,) = answered
    return {"tokens_per_s": case.prompt / (only["times_s"][0] - only["submitted_s"])}
  return stall(answered)


def decode(answered):
  """Outputs a second of all rows, from when each has some until the first one ends."""
  times = [row["times_s"] for row in answered]
  begin, end = max(row[_SETTLED - 1] for row in times), min(row[-1] for row in times)
  if end <= begin:
    raise ValueError("a row ended before every row had begun")
  count = sum(begin < time <= end for row in times for time in row)
  return {"tokens_per_s": count / (end - begin)}


def stall(answered):
  """Gaps of the decoders before and after the long prompt, the last request, arrived."""
  *decoders, long = answered
  arrived = long["submitted_s"]
  before, after = [], []
  for row in decoders:
    for last, time in itertools.pairwise(row["times_s"][_SETTLED - 1 :]):
      (before if time <= arrived else after).append(time - last)
  return {
    "base_gap_ms": 1e3 * statistics.median(before),
    "stall_ms": 1e3 * max(after),
    "ttft_s": long["times_s"][0] - arrived,
  }


def agreement(ours, theirs):
  """For every prompt, how many first tokens are the same."""
  return [
    next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
    for x, y in zip(ours, theirs, strict=True)
  ]


def decode_bytes(model, rows, context, kv_bytes_per_token):
  """Bytes that one step of a decode has to read: matrices in bfloat16, and keys and values."""
  embedding = model.vocab_size * model.hidden_size
  read = model.num_params - (0 if model.tie_word_embeddings else embedding)
  return 2 * read + rows * context * kv_bytes_per_token
