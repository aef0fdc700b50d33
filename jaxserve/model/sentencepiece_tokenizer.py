"""A SentencePiece BPE model (tokenizer.model) as the JSON of the library `tokenizers`.

The format keeps no merges; they follow from the pieces: whatever two pieces join to a third, in
order of the third's score. What the format's settings do to a text is found by trying, and the
result is compared with SentencePiece itself before it is used.
"""

from pathlib import Path
from typing import Any

_SPACE_MARK = "\u2581"
_SAMPLES = (
  "Hello world",
  " two  spaces and\ttab\nline ",
  "It's 2026: 3.14, x_1 == {y};",
  "naïve Übergröße 漢字 🙂 \u00a0",
)
_REMEDY = "use a directory with tokenizer.json instead"


def _processor(path: Path) -> Any:
  try:
    import sentencepiece
  except ImportError:
    raise ValueError(
      f"{path.parent} has no tokenizer.json, and reading its tokenizer.model takes sentencepiece; "
      "run: pip install 'jaxserve[spm]'"
    ) from None
  try:
    return sentencepiece.SentencePieceProcessor(model_file=str(path))
  except (RuntimeError, OSError) as error:
    raise ValueError(f"{path} is no SentencePiece model: {error}") from None


def _merges(scores: dict[str, float], ids: dict[str, int]) -> list[tuple[str, str]]:
  found = []
  for piece, score in scores.items():
    splits = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
    pairs = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
    found += [(score, *pair) for pair in sorted(pairs, key=lambda p: (ids[p[0]], ids[p[1]]))]
  found.sort(key=lambda entry: -entry[0])
  return [(left, right) for _, left, right in found]


def _build(sp: Any) -> Any:
  from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

  pieces = [sp.id_to_piece(i) for i in range(sp.vocab_size())]
  ids = {piece: i for i, piece in enumerate(pieces)}
  plain = [
    i for i in range(len(pieces)) if not (sp.is_control(i) or sp.is_unknown(i) or sp.is_byte(i))
  ]
  scores = {pieces[i]: sp.get_score(i) for i in plain}
  if any(score != int(score) for score in scores.values()):  # Of BPE it is a rank.
    raise ValueError("it is not a BPE model: its scores are probabilities")
  has_bytes = any(sp.is_byte(i) for i in range(len(pieces)))
  tokenizer = Tokenizer(
    models.BPE(
      vocab=ids, merges=_merges(scores, ids), unk_token=pieces[sp.unk_id()], fuse_unk=True,
      byte_fallback=has_bytes,
    )
  )  # fmt: skip
  has_prefix = sp.encode("a", out_type=str)[0].startswith(_SPACE_MARK)
  steps = [normalizers.Prepend(_SPACE_MARK)] if has_prefix else []
  tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE_MARK)])
  strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
  tokenizer.decoder = decoders.Sequence(
    [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
  )
  special = [i for i in range(len(pieces)) if sp.is_control(i) or sp.is_unknown(i)]
  tokenizer.add_special_tokens(
    [AddedToken(pieces[i], special=True, normalized=False) for i in special]
  )
  if sp.bos_id() >= 0:
    bos = pieces[sp.bos_id()]
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A", special_tokens=[(bos, sp.bos_id())]
    )
  return tokenizer


def tokenizer_json(path: Path) -> str:
  """Serializes the tokenizer of a tokenizer.model.

  Args:
    path: the file.

  Returns:
    What `tokenizers.Tokenizer.from_str` reads.

  Raises:
    ValueError: if the package sentencepiece is missing, the file is no model, or the model is of
      another kind than BPE.
  """
  sp = _processor(path)
  try:
    tokenizer = _build(sp)
    same = all(
      tokenizer.encode(sample, add_special_tokens=False).ids == sp.encode(sample)
      for sample in _SAMPLES
    )
  except Exception as error:  # `tokenizers` raises plain Exception.
    raise ValueError(f"{path}: {error}; {_REMEDY}") from None
  if not same:
    raise ValueError(f"{path}: it normalizes its text, or is not a BPE model; {_REMEDY}")
  return tokenizer.to_str()
