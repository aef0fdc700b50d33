"""Step times from the profile that was recorded with the run: microseconds of one layer's kernels.

dense.csv         time of each operator of a layer by tokens of the step
per_sequence.csv  head and sampler by rows that sample
attention.csv     by tokens of the chunk, tokens before it, decodes, and tokens cached by each
"""

import csv
import pathlib

import jax.numpy as jnp
import numpy as np

from jaxserve import sim

# How often an operator runs in one layer; those outside of the layers run once a step.
IN_LAYER = {
  "layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1, "act_fn": 1,
  "down_proj": 1,
}  # fmt: skip
ONCE = ("embedding", "final_layernorm")
PER_SEQUENCE = ("lm_head", "sampler")
TABLES = ("dense", "attention", "per_sequence")
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_MICRO = 1e-6


def read(path, fields):
  """Rows of a CSV as floats but for a first column `layer`; ValueError if one is missing."""
  with open(path, encoding="utf-8", newline="") as file:
    reader = csv.DictReader(file)
    missing = [name for name in fields if name not in (reader.fieldnames or ())]
    if missing:
      raise ValueError(f"{path}:1: {missing[0]} is missing; the columns must be {','.join(fields)}")
    try:
      return [[row[f] if f == "layer" else float(row[f]) for f in fields] for row in reader]
    except (ValueError, TypeError) as error:
      raise ValueError(f"{path}:{reader.line_num}: {error}; numbers are needed") from None


def by_operator(path, size):
  """{operator: (sizes, microseconds)}."""
  found = {}
  for name, at, micros in read(path, ("layer", size, "time_us")):
    found.setdefault(name, []).append((at, micros))
  return {name: tuple(np.array(sorted(points)).T) for name, points in found.items()}


def dense_table(path, layers):
  """Seconds of everything but attention, head and sampler, by tokens of the step."""
  operators = by_operator(path, "tokens")
  tokens = operators[ONCE[0]][0]
  total = sum(operators[name][1] for name in ONCE)
  total = total + layers * sum(count * operators[name][1] for name, count in IN_LAYER.items())
  return sim.Table([tokens], _MICRO * total)


def sequence_table(path):
  """Seconds of head and sampler, by rows that sample."""
  operators = by_operator(path, "sequences")
  sizes = operators[PER_SEQUENCE[0]][0]
  return sim.Table([sizes], _MICRO * sum(operators[name][1] for name in PER_SEQUENCE))


def attention_table(path, layers):
  """Seconds of attention in all layers on the full grid.

  The file leaves out what cannot differ: a prefix without a chunk, contexts without decodes. 256
  decodes beside a chunk were not measured: they take as much more than 128 as they do alone.
  """
  rows = np.array(read(path, (*ATTENTION, "time_us")))
  axes = [np.unique(column) for column in rows[:, :-1].T]
  values = np.full([len(axis) for axis in axes], np.nan)
  places = [np.searchsorted(axis, column) for axis, column in zip(axes, rows.T[:-1], strict=True)]
  values[tuple(places)] = rows[:, -1]
  values[:, :, 0, :] = values[:, :, 0, :1]
  values[0, 0, 0] = 0.0
  values[0] = values[0, :1]
  alone = values[:1, :1]
  values[..., 0] = np.where(np.isnan(values[..., 0]), values[..., 1], values[..., 0])
  growth = np.diff(alone, axis=2)
  for n in range(1, values.shape[2]):
    more = values[:, :, n - 1] + growth[:, :, n - 1]
    values[:, :, n] = np.where(np.isnan(values[:, :, n]), more, values[:, :, n])
  return sim.Table(axes, _MICRO * layers * values)


def path_of(folder, stem, name):
  """Where one of the tables is."""
  return pathlib.Path(folder) / f"{stem}_profile_{name}.csv"


def step_time(folder, stem, layers, host_s=0.0):
  """A StepTime from the three tables.

  Several chunks count as one that has as many tokens and sees as many keys. Fresh prompts see fewer
  than one chunk without a prefix would: its time is taken in proportion. Decodes count with their
  mean context.
  """
  dense = dense_table(path_of(folder, stem, "dense"), layers)
  attention = attention_table(path_of(folder, stem, "attention"), layers)
  head = sequence_table(path_of(folder, stem, "per_sequence"))

  def seconds(load):
    decodes = load.num_decodes.astype(jnp.float32)
    chunk = load.num_tokens.astype(jnp.float32) - decodes
    context = load.resident.astype(jnp.float32) / jnp.maximum(decodes, 1.0)
    prefix = load.attended / jnp.maximum(chunk, 1.0) - chunk / 2
    both = attention(chunk, jnp.maximum(prefix, 0.0), decodes, context)
    only = attention(0.0, 0.0, decodes, context)
    share = jnp.clip(2 * load.attended / jnp.maximum(chunk * chunk, 1.0), 0.0, 1.0)
    total = dense(load.bucket.astype(jnp.float32)) + only + share * (both - only)
    samples = jnp.sum(load.samples, dtype=jnp.float32)
    return total + jnp.where(samples > 0, head(samples), 0.0) + host_s

  return seconds
