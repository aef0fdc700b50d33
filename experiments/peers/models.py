"""The same weights for every engine, each in the format it reads; what is there is used again."""

import json
import pathlib
import shutil
import subprocess

import gguf
import ml_dtypes
import numpy as np
from absl import logging
from safetensors.numpy import save_file

from experiments.parity_goldens.reference import hf_config, hf_tensors
from experiments.peers.config import L512
from experiments.peers.install import Unavailable
from jaxserve.model import random_llama, source

_SEED = 512
_TEMPORARY = ".partial"


def prepare(name, peers_dir, cache_dir):
  """The Hugging Face directory of a model: bfloat16, matrices that engines fuse apart."""
  folder = pathlib.Path(peers_dir).expanduser() / "models" / name / "hf"
  if not folder.exists():
    if name == "l512":
      checkpoint = random_llama.random_checkpoint(L512, _SEED)
    else:
      checkpoint, _ = source.open_checkpoint(name, pathlib.Path(cache_dir).expanduser())
    _into(folder, lambda partial: write_hf(checkpoint, partial))
  return folder


def convert(wanted, hf, environment):
  """The directory of the model in the format that a peer reads.

  Args:
    wanted: "hf", "openvino" or "gguf".
    hf: directory from `prepare`.
    environment: of the peer, whose tools may be needed.

  Raises:
    Unavailable: the conversion failed.
  """
  folder = hf.parent / wanted
  if wanted == "hf" or folder.exists():
    return folder
  write = {"gguf": lambda out: write_gguf(hf, out),
           "openvino": lambda out: _export_openvino(hf, out, environment)}[wanted]  # fmt: skip
  _into(folder, write)
  return folder


def write_hf(checkpoint, folder):
  """config.json, model.safetensors and tokenizer.json."""
  config, params = checkpoint.config, checkpoint.params
  tensors = hf_tensors(config, {name: np.asarray(params[name]) for name in params})
  if config.tie_word_embeddings:
    del tensors["lm_head.weight"]
  arrays = {
    name: np.ascontiguousarray(array.astype(ml_dtypes.bfloat16)) for name, array in tensors.items()
  }
  save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
  theta = {"rope_theta": config.rope.theta, "torch_dtype": "bfloat16"}
  (folder / "config.json").write_text(json.dumps(hf_config(config) | theta, indent=1))
  tokenizer = checkpoint.tokenizer_json or _tokenizer(config.vocab_size)
  (folder / "tokenizer.json").write_text(tokenizer, "utf-8")
  kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
  (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def _tokenizer(vocab_size):
  """A tokenizer for a model that needs none: one word a token."""
  vocab = {f"<{i}>": i for i in range(vocab_size)}
  model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<0>"}
  return json.dumps({"version": "1.0", "added_tokens": [], "model": model,
                     "pre_tokenizer": {"type": "WhitespaceSplit"}})  # fmt: skip


def write_gguf(hf, folder):
  """model.gguf in bfloat16, from a Hugging Face directory of a Llama; gains in float32."""
  from safetensors import safe_open

  config = json.loads((hf / "config.json").read_text())
  writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
  _gguf_fields(writer, config)
  heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
  names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
  kind = gguf.GGMLQuantizationType.BF16
  with safe_open(hf / "model.safetensors", "numpy") as file:
    for name in file.keys():
      values = file.get_tensor(name).astype(np.float32)
      for part, count in heads.items():
        if part in name:
          values = interleaved(values, count)
      target = names.get_name(name, try_suffixes=(".weight",))
      if values.ndim == 1:
        writer.add_tensor(target, values)
      else:
        writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def interleaved(matrix, heads):
  """Rows of queries or keys in the order in which GGUF has them: pairs of a rotation together."""
  rows, width = matrix.shape
  halves = matrix.reshape(heads, 2, rows // heads // 2, width)
  return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, width)


def _gguf_fields(writer, config):
  writer.add_context_length(config["max_position_embeddings"])
  writer.add_embedding_length(config["hidden_size"])
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(config["num_attention_heads"])
  writer.add_head_count_kv(config["num_key_value_heads"])
  writer.add_rope_dimension_count(config["head_dim"])
  writer.add_rope_freq_base(config["rope_theta"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  writer.add_vocab_size(config["vocab_size"])
  writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
  # Token ids come and go, so the vocabulary is one of names only; the bytes have to be in it.
  size = config["vocab_size"]
  writer.add_tokenizer_model("llama")
  words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
  writer.add_token_list([*words, *(f"<{i}>" for i in range(len(words), size))])
  writer.add_token_scores([0.0] * size)
  writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (size - len(words))])
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  writer.add_unk_token_id(0)


def _export_openvino(hf, folder, environment):
  command = [
    environment / "bin" / "optimum-cli", "export", "openvino", "--model", hf, "--task",
    "text-generation-with-past", "--weight-format", "fp16", folder,
  ]  # fmt: skip
  done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
  if done.returncode:
    raise Unavailable(f"the export ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def _into(folder, write):
  """Lets `write` fill a folder that appears under its name when it is complete."""
  partial = folder.with_name(folder.name + _TEMPORARY)
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  logging.info("Writing %s", folder)
  write(partial)
  partial.replace(folder)
