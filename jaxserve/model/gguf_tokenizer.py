"""The tokenizer inside a GGUF file, rebuilt with `tokenizers` and serialized to its JSON.

Model code hands text code a plain string, so neither imports the other.
"""

from collections.abc import Mapping
from typing import Any

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types.
_LLAMA3_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe")
_REMEDY = "use a directory with tokenizer.json instead"


def _pre_tokenizer(pre: str) -> Any:
  from tokenizers import Regex, pre_tokenizers

  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
  if pre == "smollm":
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
  if pre == "gpt-2":
    return byte_level
  if pre == "llama-bpe":
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, plain])
  supported = ", ".join(_PRE_TOKENIZERS)
  raise ValueError(f"tokenizer.ggml.pre={pre!r} is not one of {supported}; {_REMEDY}")


def _add_special_tokens(tokenizer: Any, tokens: list[str], types: list[int]) -> None:
  from tokenizers import AddedToken

  for token, kind in zip(tokens, types, strict=True):
    if kind == _CONTROL:
      tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    elif kind == _USER_DEFINED:
      tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _check_fields(fields: Mapping[str, Any]) -> None:
  kind = fields.get("tokenizer.ggml.model")
  if kind != "gpt2":
    raise ValueError(f"tokenizer.ggml.model={kind!r} is not supported, 'gpt2' is; {_REMEDY}")
  needed = (f"tokenizer.ggml.{key}" for key in ("tokens", "merges", "token_type"))
  if missing := [key for key in needed if key not in fields]:
    raise ValueError(f"its metadata lacks {', '.join(missing)}; {_REMEDY}")


def tokenizer_json(fields: Mapping[str, Any]) -> str:
  """Serializes the byte-level BPE tokenizer that a GGUF describes.

  Args:
    fields: the GGUF's metadata.

  Returns:
    What `tokenizers.Tokenizer.from_str` reads.

  Raises:
    ValueError: if it is of another kind, or its parts are missing.
  """
  from tokenizers import Tokenizer, decoders, models, processors

  _check_fields(fields)
  pre = fields.get("tokenizer.ggml.pre", "gpt-2")
  tokens = fields["tokenizer.ggml.tokens"]
  merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
  is_llama3 = pre == "llama-bpe"
  try:
    vocab = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3)
    tokenizer = Tokenizer(model)
  except Exception as error:  # `tokenizers` raises plain Exception.
    raise ValueError(f"its tokenizer is inconsistent: {error}; {_REMEDY}") from None
  tokenizer.pre_tokenizer = _pre_tokenizer(pre)
  tokenizer.decoder = decoders.ByteLevel()
  _add_special_tokens(tokenizer, tokens, fields["tokenizer.ggml.token_type"])
  bos = fields.get("tokenizer.ggml.bos_token_id")
  if bos is not None and fields.get("tokenizer.ggml.add_bos_token", is_llama3):
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
    )
  return tokenizer.to_str()
