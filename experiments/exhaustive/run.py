"""Every search of the grid; those of one model share what is compiled."""

import dataclasses
import functools
import time

from absl import logging

from experiments.exhaustive.model import expansion
from experiments.exhaustive.search import search

compiled = functools.lru_cache(maxsize=1)(expansion)


def run(config, store):
  """One row a setting."""
  settings = {digest(setting): setting for setting in config.settings()}
  named = [dataclasses.asdict(setting) for setting in settings.values()]
  fixed = {"most_states": config.most_states}

  def measure(row):
    return measured(settings[tuple(row.values())], config.most_states)

  return store.measure("Searching", fixed, named, measure)


def digest(setting):
  return tuple(dataclasses.asdict(setting).values())


def measured(setting, most_states):
  """What one search saw, as numbers; `violation` is a sentence, or None."""
  begin, model, params = time.perf_counter(), setting.model(), setting.params()
  if not model.possible(params).any():
    return {"states": 0, "violation": None}
  found = search(model, params, compiled(model), most_states)
  violation = found.violation.words() if found.violation else None
  if violation:
    logging.error("%s: %s", setting, violation)
  return {
    "states": found.states, "transitions": found.transitions, "depth": found.depth,
    "longest_drain": found.longest_drain, "longest_idle": found.longest_idle,
    "preempting": found.preempting, "seconds": round(time.perf_counter() - begin, 2),
    "violation": violation,
  }  # fmt: skip
