"""The experiment's load: who arrives when, and that it fits the engine."""

from jaxserve.replay import experiment
from jaxserve.replay.workload import QUESTIONS, StallSizes, fitted, stall_workload
from jaxserve.text.tokenizer import ByteTokenizer

SIZES = StallSizes(streams=3, late_streams=2, spacing_steps=2.0, late_spacing_steps=5.0)


def load(sizes=SIZES):
  encode = lambda question: list(question.encode())
  return stall_workload(encode, [1, 2, 3], step_s=0.5, sizes=sizes)


def test_long_prompt_arrives_among_decoding_streams_and_others_follow():
  arrivals = load()
  assert [(a.id, a.at_s) for a in arrivals] == [
    ("chat-1", 0.0), ("chat-2", 1.0), ("chat-3", 2.0), ("long", 3.0), ("chat-4", 5.5),
    ("chat-5", 8.0),
  ]  # fmt: skip
  (long,) = [a for a in arrivals if a.is_long_prompt]
  assert long.prompt == (1, 2, 3) and long.max_tokens == SIZES.long_max_tokens
  assert arrivals[1].prompt == tuple(QUESTIONS[1].encode())


def test_questions_are_reused_when_there_are_more_streams():
  arrivals = load(StallSizes(streams=len(QUESTIONS) + 1, late_streams=0))
  chats = [a for a in arrivals if not a.is_long_prompt]
  assert chats[-1].prompt == chats[0].prompt and chats[-1].id != chats[0].id


def test_sizes_are_cut_to_the_model_and_half_the_pool():
  assert fitted(StallSizes(), 8192, 32768) == StallSizes()
  assert fitted(StallSizes(), 200, 32768).longest == 199
  assert fitted(StallSizes(), 8192, 300).longest == 150


def test_long_prompt_has_the_length_asked_for_and_stays_a_chat():
  tokenizer = ByteTokenizer()
  frame = lambda q: list(b"<user>" + q.encode() + b"<end>")
  for length in (90, 1000, 30000):
    prompt = experiment._long_prompt(tokenizer, frame, length)
    text = bytes(prompt).decode()
    assert len(prompt) == length
    assert text.startswith("<user>Alice's Adventures") or length < 100
    assert text.endswith("<end>") or length < 100
