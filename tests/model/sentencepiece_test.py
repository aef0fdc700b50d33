"""A tokenizer.model without a tokenizer.json: rebuilt, and only if it is the same."""

import importlib.util
import json

import pytest

from jaxserve.model.sentencepiece_tokenizer import tokenizer_json
from jaxserve.text.tokenizer import load_tokenizer
from tests.model.directory_test import fails, write

pytestmark = pytest.mark.one_leg

HAS_SENTENCEPIECE = importlib.util.find_spec("sentencepiece") is not None
needs_sentencepiece = pytest.mark.skipif(
  not HAS_SENTENCEPIECE, reason="not installed: sentencepiece"
)
SENTENCES = (
  "the quick brown fox jumps over the lazy dog",
  "  two spaces,  and the end\n",
  "naïve 漢字 🙂 in 2026",
  "",
)


def train(path, kind="bpe", **options):
  import sentencepiece

  corpus = path.parent / "corpus.txt"
  corpus.write_text("the quick brown fox jumps over the lazy dog and the other dogs\n" * 50)
  settings = {
    "vocab_size": 320, "byte_fallback": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "hard_vocab_limit": False, "minloglevel": 2,
  }  # fmt: skip
  sentencepiece.SentencePieceTrainer.train(
    input=str(corpus),
    model_prefix=str(path.with_suffix("")),
    model_type=kind,
    **(settings | options),
  )
  return sentencepiece.SentencePieceProcessor(model_file=str(path))


@needs_sentencepiece
class TestBpe:
  @pytest.mark.parametrize("prefix", [True, False])
  def test_the_same_ids_and_texts(self, tmp_path, prefix):
    sp = train(tmp_path / "tokenizer.model", add_dummy_prefix=prefix)
    tokenizer = load_tokenizer(tokenizer_json(tmp_path / "tokenizer.model"))
    assert tokenizer.vocab_size == sp.vocab_size()
    for text in SENTENCES:
      ids = tokenizer.encode(text, add_special_tokens=False)
      assert ids == sp.encode(text)
      assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a")[0] == sp.bos_id() and tokenizer.is_special(sp.eos_id())

  def test_a_directory_without_tokenizer_json(self, tmp_path):
    (write(tmp_path / "m") / "tokenizer.json").unlink()
    train(tmp_path / "m/tokenizer.model")
    from jaxserve.model import hf_directory

    read = hf_directory.read_hf_directory(tmp_path / "m", "float32")
    assert json.loads(read.tokenizer_json)["model"]["type"] == "BPE"

  @pytest.mark.parametrize(
    "options", [{"kind": "unigram"}, {"normalization_rule_name": "nmt_nfkc_cf"}]
  )
  def test_what_would_differ_is_refused(self, tmp_path, options):
    train(tmp_path / "tokenizer.model", **options)
    with pytest.raises(
      ValueError, match=r"tokenizer\.model: it .*BPE model.*tokenizer\.json instead"
    ):
      tokenizer_json(tmp_path / "tokenizer.model")

  def test_no_model_at_all(self, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"tokenizer\.model is no SentencePiece model"):
      tokenizer_json(tmp_path / "tokenizer.model")


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
  import sys

  monkeypatch.setitem(sys.modules, "sentencepiece", None)
  (write(tmp_path / "m") / "tokenizer.json").rename(tmp_path / "m/tokenizer.model")
  fails(tmp_path / "m", r"pip install 'jaxserve\[spm\]'")


def test_no_tokenizer_of_any_kind(tmp_path):
  (write(tmp_path / "m") / "tokenizer.json").unlink()
  fails(tmp_path / "m", "no tokenizer.json and no tokenizer.model")
