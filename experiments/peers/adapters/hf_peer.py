"""Hugging Face transformers, as a worker: a forward loop over static batches.

Requests of equal length that arrive together are one batch. A prompt that arrives while a batch
decodes is prefilled chunk by chunk, each followed by a step of the batch.
"""

import importlib.metadata

import protocol
import torch
import transformers


class Batch:
  """Requests of one length that are computed together."""

  def __init__(self, keys, prompts, tokens):
    self.keys, self.left, self.done = keys, tokens, 0
    self.ids = torch.tensor(prompts)
    self.cache = transformers.DynamicCache()

  @property
  def in_prompt(self):
    return self.done < self.ids.shape[1]


class HuggingFace:
  """`LlamaForCausalLM` in bfloat16 with PyTorch's own attention."""

  def load(self, model, options):
    del options
    self._model = transformers.AutoModelForCausalLM.from_pretrained(
      model, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    self._waiting, self._batches, self._chunk = [], [], None
    names = ("transformers", "torch")
    return {"versions": {name: importlib.metadata.version(name) for name in names}}

  def set_chunk(self, chunk):
    self._chunk = chunk

  def submit(self, key, prompt, tokens):
    self._waiting.append((key, prompt, tokens))

  def _admit(self):
    groups = {}
    for key, prompt, tokens in self._waiting:
      groups.setdefault((len(prompt), tokens), []).append((key, prompt))
    for (_, tokens), members in groups.items():
      keys, prompts = zip(*members, strict=True)
      self._batches.append(Batch(keys, prompts, tokens))
    self._waiting = []

  @torch.inference_mode()
  def step(self):
    self._admit()
    decoding = [batch for batch in self._batches if not batch.in_prompt]
    prefilling = [batch for batch in self._batches if batch.in_prompt]
    room = (self._chunk or 1 << 30) - sum(len(batch.keys) for batch in decoding)
    found = []
    for batch in [*decoding, *prefilling[:1]]:
      found += self._forward(batch, room)
    self._batches = [batch for batch in self._batches if batch.left]
    return found

  def _forward(self, batch, room):
    if batch.in_prompt:
      end = batch.done + max(room // len(batch.keys), 1)
      ids = batch.ids[:, batch.done : end]
    else:
      ids = batch.last
    out = self._model(ids, past_key_values=batch.cache, use_cache=True, logits_to_keep=1)
    batch.done += ids.shape[1]
    if batch.in_prompt:
      return []
    batch.last = out.logits[:, -1].argmax(-1, keepdim=True)
    batch.left -= 1
    return [(key, [row[0]]) for key, row in zip(batch.keys, batch.last.tolist(), strict=True)]


if __name__ == "__main__":
  protocol.main(HuggingFace())
