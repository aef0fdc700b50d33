"""Tokenizers: ids and text, whatever the kind, and agreement with `tokenizers` itself."""

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st

from jaxserve.text.tokenizer import ByteTokenizer, HfTokenizer, load_tokenizer
from tests.testing import tokenizers as tiny

KINDS = {"byte_level": tiny.byte_level, "byte_fallback": tiny.byte_fallback}


@pytest.fixture(scope="module", params=[*KINDS, "bytes"])
def tokenizer(request):
  kind = KINDS.get(request.param)
  return load_tokenizer(kind() if kind else None, eos_token_ids=(3,), bos_token_id=1)


class TestEveryKind:
  @hypothesis.given(text=st.text())
  @hypothesis.example(text="Hi 😀! é\x00\n  ")
  def test_text_survives(self, tokenizer, text):
    text = text.replace(tiny.SPACE_MARK, " ")  # SentencePiece cannot tell it from a space.
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text

  def test_a_lone_surrogate_is_no_error(self, tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud83d.")) == "a?."

  def test_ids_beyond_the_vocabulary_are_no_text(self, tokenizer):
    # A model's vocabulary is often padded; random weights do sample from the padding.
    ids = tokenizer.encode("Hi")
    assert tokenizer.decode([*ids, tokenizer.vocab_size, tokenizer.vocab_size + 99]) == "Hi"

  def test_nothing(self, tokenizer):
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


class TestHfTokenizer:
  @pytest.mark.parametrize("kind", KINDS)
  @hypothesis.given(data=st.data())
  def test_decodes_valid_text_as_the_library_does(self, kind, data):
    library = tokenizers.Tokenizer.from_str(KINDS[kind]())
    ours = HfTokenizer(KINDS[kind]())
    ids = library.encode(data.draw(st.text())).ids
    assert ours.decode(ids) == library.decode(ids)

  @hypothesis.given(ids=st.lists(st.integers(0, 259)))
  def test_byte_level_decodes_any_ids_as_the_library_does(self, ids):
    library = tokenizers.Tokenizer.from_str(tiny.byte_level())
    assert HfTokenizer(tiny.byte_level()).decode(ids) == library.decode(ids)

  def test_special_tokens(self):
    tokenizer = HfTokenizer(tiny.byte_level())
    ids = tokenizer.encode(f"a{tiny.END}漢 字")
    assert ids == [ord("a"), 258, 259]
    assert [tokenizer.is_special(i) for i in ids] == [False, True, False]
    assert tokenizer.decode(ids) == "a漢 字"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{tiny.END}漢 字"

  def test_token_bytes(self):
    byte_level, fallback = HfTokenizer(tiny.byte_level()), HfTokenizer(tiny.byte_fallback())
    assert byte_level.token_bytes(0x20) == b" "
    assert byte_level.token_bytes(257) == b"\xf0\x9f"
    assert byte_level.token_bytes(259) == "漢 字".encode()
    assert fallback.token_bytes(1 + 0xF0) == b"\xf0"
    assert fallback.token_bytes(257) == b" "
    assert HfTokenizer(tiny.metaspace()).token_bytes(0) is None

  def test_a_padded_or_truncated_serialization_encodes_in_full(self):
    library = tokenizers.Tokenizer.from_str(tiny.byte_level())
    library.enable_truncation(2)
    library.enable_padding(length=9)
    assert HfTokenizer(library.to_str()).encode("abc") == [ord(c) for c in "abc"]

  def test_garbage_is_a_value_error(self):
    with pytest.raises(ValueError, match="the tokenizer cannot be read"):
      load_tokenizer("{}")


class TestByteTokenizer:
  def test_special_tokens_are_recognised_and_end_a_reply(self):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids == [256, ord("a"), 257]
    assert tokenizer.eos_token_ids == (257, 258)
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode(ids) == "a"

  def test_the_random_model_has_its_vocabulary(self):
    from jaxserve.model.random_llama import random_checkpoint

    checkpoint, tokenizer = random_checkpoint(), ByteTokenizer()
    assert checkpoint.config.vocab_size == tokenizer.vocab_size
    assert checkpoint.eos_token_ids == tokenizer.eos_token_ids
