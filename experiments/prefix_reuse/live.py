"""Two turns of a chat on the real engine: the time to the first token of the second."""

import pathlib
import statistics

import numpy as np

from experiments import provenance
from jaxserve.engine import SamplingParams, clock, startup


def run(config, store):
  settings = [{"chat": "cached"}, {"chat": "computed"}]
  fixed = {
    "model": config.model, "first": config.first, "second": config.second,
    "outputs": config.outputs, "chats": config.chats, "budget": config.budget,
    "commit": provenance.collect()["commit"],
  }  # fmt: skip

  def measure(some):
    return measure_turns(config, start(config).engine, [one["chat"] == "cached" for one in some])

  return store.measure_many("Chats", fixed, settings, measure)


def start(config):
  length = config.first + config.second + 2 * config.outputs + 1
  started = startup.start(
    startup.StartOptions(
      model=config.model, cache_dir=pathlib.Path(config.cache_dir).expanduser(),
      budget=config.budget, max_num_seqs=4, max_model_len=length, kv_cache_tokens=4 * length,
    )
  )  # fmt: skip
  started.engine.warm_up()
  return started


def measure_turns(config, engine, arms):
  """Medians over the chats, a row an arm; without the cache the engine computes prompts whole.

  Arms take turns in every chat, so that a slow minute of the machine falls upon both.
  """
  rng = np.random.default_rng(0)
  vocabulary = engine.config.model.vocab_size
  turns = [[] for _ in arms]
  for _ in range(config.chats):
    first = rng.integers(0, vocabulary, config.first).tolist()
    second = rng.integers(0, vocabulary, config.second).tolist()
    for cached, done in zip(arms, turns, strict=True):
      engine.reset_prefix_cache()
      one = ask(config, engine, first, cached)
      done.append((one, ask(config, engine, first + one["tokens"] + second, cached)))
  return [medians(done) for done in turns]


def medians(turns):
  return {
    f"{name}_{key}": statistics.median(turn[number][key] for turn in turns)
    for number, name in enumerate(("first", "second"))
    for key in ("ttft_ms", "prompt_tokens", "cached_tokens", "computed_tokens")
  } | {"texts": [one["tokens"][:4] + two["tokens"][:4] for one, two in turns]}


def ask(config, engine, prompt, cached):
  """One request alone on the engine."""
  sampling = SamplingParams(
    max_tokens=config.outputs, ignore_eos=True, reads_prefix_cache=cached
  )  # fmt: skip
  begin, first_s, tokens, computed, found = clock.now(), None, [], 0, 0
  engine.submit(prompt, sampling)
  while not engine.is_idle:
    events = engine.step()
    found += sum(part.cached for part in events.scheduled)
    computed += sum(part.tokens for part in events.scheduled if part.is_prefill)
    tokens += [event.token for event in events.outputs]
    first_s = events.done_s if tokens and first_s is None else first_s
  return {
    "tokens": tokens, "ttft_ms": round(1e3 * (first_s - begin), 2), "cached_tokens": found,
    "computed_tokens": computed, "prompt_tokens": len(prompt),
  }  # fmt: skip
