"""The worked steps of chunked prefill: numbers one can check by hand."""

import logging

import numpy as np
import pytest

from jaxserve import sched
from jaxserve.config import CacheConfig, ModelConfig, SchedulerConfig
from tests.testing.scheduling import compiled


def make(budget, **params):
  config = SchedulerConfig(
    cache=CacheConfig(num_pages=1000, page_size=16),
    max_num_seqs=16, max_requests=16, max_budget=2048, max_model_len=5000,
  )  # fmt: skip
  return Lives(config, sched.make_params(config, budget=budget, max_num_seqs=12, **params))


class Lives:
  def __init__(self, config, params):
    self.params = params
    self.schedule_fn, self.submit_fn, _, self.commit_fn = compiled(config)
    self.state = sched.init(config)
    self.none = np.zeros(config.max_requests, bool)

  def submit(self, num_prompt, max_tokens=100):
    self.state, slot = self.submit_fn(
      self.state, np.int32(num_prompt), np.int32(num_prompt + max_tokens),
      priority=np.int32(0), await_host=np.bool_(False),
    )  # fmt: skip
    return int(slot)

  def step(self):
    self.state, decision = self.schedule_fn(self.state, self.params)
    self.state, _ = self.commit_fn(self.state, decision, self.none)
    return {int(q): int(decision.tokens[q]) for q in np.flatnonzero(decision.tokens)}


def test_a_lone_prompt_takes_seven_full_chunks_and_a_tail():
  lives = make(budget=512)
  slot = lives.submit(4000)
  chunks = [lives.step()[slot] for _ in range(8)]
  assert chunks == [512] * 7 + [416]
  assert lives.step() == {slot: 1}


def test_b_decodes_then_running_prefill_then_head_of_queue():
  lives = make(budget=2048)
  decoders = [lives.submit(2) for _ in range(8)]
  lives.step()
  running = lives.submit(1440 + 2040)
  assert lives.step()[running] == 2040
  first, second = lives.submit(900), lives.submit(500)
  assert lives.step() == {d: 1 for d in decoders} | {running: 1440, first: 600}
  assert second in lives.step()


def test_c_a_prompt_takes_what_is_left_now_and_the_rest_later():
  lives = make(budget=512)
  slot = lives.submit(4000)
  assert lives.step() == {slot: 512}
  assert int(lives.state.num_known[slot] - lives.state.num_computed[slot]) == 3488


def test_partial_prefill_yields_no_sample():
  lives = make(budget=512)
  slot = lives.submit(600)
  state, decision = lives.schedule_fn(lives.state, lives.params)
  assert not decision.samples[slot] and state.num_in_flight[slot] == 0
  _, decision = lives.schedule_fn(state, lives.params)
  assert decision.samples[slot]


def test_budget_equal_to_seats_never_advances_a_prefill_while_all_decode():
  lives = make(budget=12)
  decoders = [lives.submit(1) for _ in range(11)]
  lives.step()
  late = lives.submit(40)
  assert lives.step() == {d: 1 for d in decoders} | {late: 1}


def test_threshold_spares_a_lone_request_only_when_asked():
  capped = make(budget=2048, long_prefill_token_threshold=512)
  slot = capped.submit(2000)
  assert capped.step() == {slot: 512}
  spared = make(budget=2048, long_prefill_token_threshold=512, cap_when_alone=False)
  slot = spared.submit(4000)
  assert spared.step() == {slot: 2048}
  other = spared.submit(4000)
  assert spared.step() == {slot: 512, other: 512}


def test_reservation_counts_what_admitted_prompts_still_need():
  """With 10 pages, two 96-token prompts (6 pages each) never run at once; without, they do."""

  def admitted(reserve):
    config = SchedulerConfig(
      cache=CacheConfig(num_pages=10, page_size=16), reserve=reserve,
      max_num_seqs=4, max_requests=4, max_budget=64, max_model_len=160,
    )  # fmt: skip
    lives = Lives(config, sched.make_params(config))
    for _ in range(2):
      lives.submit(96, max_tokens=8)
    for _ in range(2):  # the second prompt is looked at when the first has 32 tokens left
      granted = lives.step()
    return len(granted)

  assert admitted("growth") == 1
  assert admitted("none") == 2


def test_encoder_decoder_turns_chunking_off_with_a_log_line(caplog):
  model = ModelConfig(
    vocab_size=7, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=2, is_encoder_decoder=True,
  )  # fmt: skip
  with caplog.at_level(logging.WARNING):
    assert sched.chunking_allowed(model, True, 512) == (False, 0)
  assert "encoder-decoder" in caplog.text


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers():
  config = SchedulerConfig(
    cache=CacheConfig(num_pages=10, page_size=16),
    max_num_seqs=4, max_requests=4, max_budget=64, max_model_len=400,
  )  # fmt: skip
  params = sched.make_params(config)
  sched.check_request(config, params, 160, 1)
  for num_prompt, max_tokens in ((161, 1), (150, 100), (161, None)):
    with pytest.raises(ValueError, match="the whole pool has 160"):
      sched.check_request(config, params, num_prompt, max_tokens)
  assert sched.request_limit(config, 150, None) == 161
  unchunked = sched.make_params(config, chunked_prefill=False)
  with pytest.raises(ValueError, match="budget=64 with chunked_prefill off"):
    sched.check_request(config, unchunked, 65, 1)
