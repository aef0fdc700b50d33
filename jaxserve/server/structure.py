"""What decides, token by token, about an output: a grammar, words that it must not have."""

import dataclasses
from collections.abc import Sequence

from jaxserve.engine import SamplingParams
from jaxserve.engine.sampling_row import mask_of
from jaxserve.server import grammar, tools
from jaxserve.server.bad_words import BadWords, Barred, Run, runs_of
from jaxserve.server.errors import conflicting, invalid
from jaxserve.server.grammar import Grammar
from jaxserve.server.protocol import ChatRequest, Sampled
from jaxserve.server.service import Served
from jaxserve.server.shapes import MAX_BAD_WORDS

OutputRule = Grammar | BadWords


def applied(
  request: Sampled, sampling: SamplingParams, served: Served
) -> tuple[SamplingParams, OutputRule | None]:
  """The options with what is never drawn, and the rule of an output, to be copied for each.

  Raises:
    ApiError: what is asked for is not to be had.
  """
  calls = tools.wanted_calls(request) if isinstance(request, ChatRequest) else None
  wanted = grammar.wanted_of(request, calls)
  if wanted is not None and (sampling.min_tokens or sampling.allowed_token_ids is not None):
    field = "min_tokens" if sampling.min_tokens else "allowed_token_ids"
    raise conflicting(field, f"{field}: not together with {wanted.param}")
  made = None if wanted is None else served.grammars.make(wanted)
  runs = _runs(request.bad_words or (), served)
  if made is None and all(len(run) == 1 for run in runs):
    never = tuple(token for run in runs for token in run)
    return dataclasses.replace(sampling, bad_token_ids=never), None
  if not runs:
    return sampling, made
  config = served.engine.config
  size = config.model.vocab_size
  stops = sampling.check(size, config.eos_token_ids)
  barred = Barred(runs, mask_of(sampling, size), sampling.min_tokens, stops)
  return sampling, BadWords(barred, made)


def _runs(words: Sequence[str], served: Served) -> list[Run]:
  if len(words) > MAX_BAD_WORDS or not all(words):
    raise invalid("bad_words", f"bad_words: at most {MAX_BAD_WORDS} words, none of them empty")
  return runs_of(words, served.tokenizer)
