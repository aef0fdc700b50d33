"""Tiny tokenizers of each kind that checkpoints have, serialized as in tokenizer.json."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.testing.gguf_files import BYTE_TOKENS

END = "<|im_end|>"
SPACE_MARK = "\u2581"


def byte_level(merges=(("h", "e"), ("ð", "Ł"))) -> str:
  """GPT-2's kind: 256 byte tokens, the merges, a special token, and an added one that is text."""
  tokens = [*BYTE_TOKENS, *("".join(pair) for pair in merges)]
  vocab = {token: i for i, token in enumerate(tokens)}
  tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([END])
  tokenizer.add_tokens([AddedToken("漢 字", normalized=False)])
  return tokenizer.to_str()


def byte_fallback() -> str:
  """Llama-2's kind: pieces with a mark for the space, and bytes for what has no piece."""
  pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE_MARK, "H", "i", "é"]
  vocab = {piece: i for i, piece in enumerate(pieces)}
  tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
  tokenizer.normalizer = normalizers.Sequence(
    [normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)]
  )
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace(SPACE_MARK, " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  tokenizer.add_special_tokens(["<unk>"])
  return tokenizer.to_str()


def metaspace() -> str:
  """A kind whose decoder cannot be told token by token."""
  pieces = ["<unk>", SPACE_MARK, "H", "i", SPACE_MARK + "H", "é"]
  vocab = {piece: i for i, piece in enumerate(pieces)}
  tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(SPACE_MARK, "H")], unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
  tokenizer.decoder = decoders.Metaspace()
  tokenizer.add_special_tokens([END])
  return tokenizer.to_str()
