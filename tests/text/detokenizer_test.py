"""Streaming: what is sent is certain, nothing is held for ever, and the whole is the text."""

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxserve.text.detokenizer import ByteDetokenizer, WindowDetokenizer, make_detokenizer
from jaxserve.text.tokenizer import ByteTokenizer, load_tokenizer
from tests.testing import tokenizers as tiny

FFFD = "\ufffd"

# (bytes of each token, what is sent after each, what the flush adds). The splits are those of real
# vocabularies of byte-level BPE and of byte fallback.
VECTORS = {
  "emoji": (["4869", "20f09f", "98", "80", "21"], ["Hi", " ", "", "😀", "!"], ""),
  "skin tone": (
    ["f0", "9f", "91", "8d", "f0", "9f", "8f", "bd", "6f6b"],
    ["", "", "", "👍", "", "", "", "🏽", "ok"],
    "",
  ),
  "hindi": (["e0a4a8", "e0a4ae", "e0a587", "20e0a4a6"], ["न", "म", "े", " द"], ""),
  "a note after a space": (["53747261", "c39f65", "20e299", "ac"], ["Stra", "ße", " ", "♬"], ""),
  "real U+FFFD": (["efbfbd"] * 6, [FFFD] * 6, ""),
  "U+FFFD in parts": (["ef", "bf", "bd"], ["", "", FFFD], ""),
  "continuation bytes alone": (["80"] * 5, [FFFD] * 5, ""),
  "never a byte": (["ff", "fe", "41"], [FFFD, FFFD, "A"], ""),
  "broken off by a letter": (["f0", "9f", "41"], ["", "", FFFD + "A"], ""),
  "broken off by another": (
    ["f0", "9f", "98", "f0", "9f", "98", "80"],
    ["", "", "", FFFD, "", "", "😀"],
    "",
  ),
  "beyond Unicode": (["f4", "90", "80", "80"], ["", FFFD * 2, FFFD, FFFD], ""),
  "ends inside a character": (["4869", "20f0", "9f"], ["Hi", " ", ""], FFFD),
}


@pytest.mark.parametrize(("tokens", "deltas", "end"), VECTORS.values(), ids=VECTORS.keys())
class TestVectors:
  def test_each_push_sends_what_is_certain(self, tokens, deltas, end):
    detokenizer = make_detokenizer(ByteTokenizer())
    assert [detokenizer.push(bytes.fromhex(token)) for token in tokens] == deltas
    assert detokenizer.flush() == end

  def test_the_whole_is_the_text_decoded_at_once(self, tokens, deltas, end):
    ids = bytes.fromhex("".join(tokens))
    assert "".join(deltas) + end == ByteTokenizer().decode(ids)


@pytest.mark.parametrize("kind", [tiny.byte_level, tiny.byte_fallback, lambda: None])
class TestByteDetokenizer:
  @hypothesis.given(data=st.data())
  def test_streamed_and_at_once_agree_for_any_ids(self, kind, data):
    tokenizer = load_tokenizer(kind())
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    detokenizer = make_detokenizer(tokenizer)
    assert isinstance(detokenizer, ByteDetokenizer)
    held = 0
    text = ""
    for i in ids:
      delta = detokenizer.push([i])
      text += delta
      if delta:
        held = 0
      elif not tokenizer.is_special(i):
        held += len(tokenizer.token_bytes(i))
      assert held < 4
    text += detokenizer.flush()
    at_once = tokenizer.decode(ids)
    # A text on its own has no space in front; one that continues a prompt keeps it.
    assert text == at_once or (kind is tiny.byte_fallback and text == " " + at_once)

  def test_several_tokens_at_once(self, kind):
    tokenizer = load_tokenizer(kind())
    ids = tokenizer.encode("Hi 😀é")
    detokenizer = make_detokenizer(tokenizer)
    assert (detokenizer.push(ids[:4]) + detokenizer.push(ids[4:])).strip() == "Hi 😀é"

  def test_a_flush_starts_afresh(self, kind):
    tokenizer = load_tokenizer(kind())
    begun = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    detokenizer = make_detokenizer(tokenizer)
    assert detokenizer.push([begun]) == ""
    assert detokenizer.flush() == FFFD
    assert detokenizer.flush() == ""

  def test_special_tokens_are_left_out_unless_asked_for(self, kind):
    tokenizer = load_tokenizer(kind())
    special = next(i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i))
    assert make_detokenizer(tokenizer).push([special]) == ""
    shown = make_detokenizer(tokenizer, skip_special_tokens=False).push([special])
    assert shown == tokenizer.token_bytes(special).decode()


class TestWindowDetokenizer:
  def stream(self, tokenizer, ids, prompt_ids=()):
    detokenizer = make_detokenizer(tokenizer, prompt_ids=prompt_ids)
    assert isinstance(detokenizer, WindowDetokenizer)
    return [detokenizer.push([i]) for i in ids] + [detokenizer.flush()]

  def test_the_whole_is_the_text(self):
    tokenizer = load_tokenizer(tiny.metaspace())
    ids = tokenizer.encode("Hi Hié Hi")
    assert "".join(self.stream(tokenizer, ids)) == "Hi Hié Hi" == tokenizer.decode(ids)

  def test_what_continues_a_prompt_keeps_its_space(self):
    tokenizer = load_tokenizer(tiny.metaspace())
    ids = tokenizer.encode("Hi Hi")
    assert "".join(self.stream(tokenizer, ids[2:], prompt_ids=ids[:2])) == " Hi"

  def test_a_real_replacement_character_does_not_hold_the_text_for_ever(self):
    class Echo:
      """Not local, and all it says is U+FFFD."""

      def decode(self, ids, *, skip_special_tokens=True):
        return FFFD * len(ids)

      def is_special(self, token_id):
        return False

    detokenizer = WindowDetokenizer(Echo())
    assert [detokenizer.push([0]) for _ in range(8)] == ["", "", "", FFFD * 4] * 2
    assert detokenizer.push([0]) == "" and detokenizer.flush() == FFFD
