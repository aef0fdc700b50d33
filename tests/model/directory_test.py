"""Hugging Face directories as they are found: damaged, hostile, half-downloaded or unusual."""

import json
import resource
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from experiments.parity_goldens.reference import hf_config, hf_tensors
from jaxserve.model import hf_directory, llama, shards
from tests.testing.gguf_files import CONFIG

pytestmark = pytest.mark.one_leg

INDEX = "model.safetensors.index.json"


def tensors(seed=0):
  return {
    name: np.ascontiguousarray(array)
    for name, array in hf_tensors(CONFIG, llama.random_params(CONFIG, seed)).items()
  }


def write(directory, arrays=None, *, per_file=None, **config):
  """A checkpoint of `arrays`; `per_file` of them a shard, with an index."""
  directory.mkdir(exist_ok=True)
  arrays = tensors() if arrays is None else arrays
  (directory / "config.json").write_text(json.dumps(hf_config(CONFIG) | config))
  (directory / "tokenizer.json").write_text("{}")
  if per_file is None:
    save_file(arrays, directory / "model.safetensors")
    return directory
  names, weight_map = list(arrays), {}
  for at in range(0, len(names), per_file):
    part = names[at : at + per_file]
    file = f"{part[0]}.safetensors"
    save_file({name: arrays[name] for name in part}, directory / file)
    weight_map |= dict.fromkeys(part, file)
  index = {"metadata": {"mergekit_version": "0.0.4.4", "total_size": 1}, "weight_map": weight_map}
  (directory / INDEX).write_text(json.dumps(index))
  return directory


def fails(directory, match):
  with pytest.raises(ValueError, match=match) as caught:
    hf_directory.read_hf_directory(directory, "float32")
  assert str(directory) in str(caught.value) and "\n" not in str(caught.value)
  return str(caught.value)


def same(read):
  expected = llama.random_params(CONFIG, 0)
  for name, array in expected.items():
    np.testing.assert_array_equal(read.params[name], array, err_msg=name)


class TestGood:
  def test_one_tensor_a_file(self, tmp_path):
    same(hf_directory.read_hf_directory(write(tmp_path / "m", per_file=1), "float32"))

  def test_a_cache_of_the_hub_is_made_of_links(self, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0f"
    blobs.mkdir(parents=True)
    write(tmp_path / "m").rename(tmp_path / "plain")
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "plain").iterdir())):
      path.rename(blobs / str(number))
      (snapshot / path.name).symlink_to(blobs / str(number))
    same(hf_directory.read_hf_directory(snapshot, "float32"))

  @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
  def test_each_access_reads_in_the_dtype_asked_for_or_the_files(self, tmp_path, dtype):
    stored = {name: array.astype(dtype) for name, array in tensors().items()}
    write(tmp_path / "m", stored)
    for wanted, got in (("float32", np.float32), (None, dtype)):
      params = hf_directory.read_hf_directory(tmp_path / "m", wanted).params
      assert params["layers.0.gate_up"].dtype == got and params["norm"].dtype == np.float32
      gate = stored["model.layers.0.mlp.gate_proj.weight"]
      np.testing.assert_array_equal(params["layers.0.gate_up"][: len(gate)], gate.astype(got))
    assert params.num_bytes == sum(array.nbytes for array in stored.values())

  def test_arrays_are_aligned_so_that_nobody_copies_them(self, tmp_path):
    params = hf_directory.read_hf_directory(write(tmp_path / "m"), "float32").params
    assert all(params[name].ctypes.data % 64 == 0 for name in params)

  def test_the_ends_of_a_reply_come_from_all_files(self, tmp_path):
    write(tmp_path / "m", eos_token_id=[1, 2])
    added = [{"id": 5, "content": "<eos>"}, {"id": 7, "content": "<end_of_turn>"}]
    (tmp_path / "m/tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    config = {"eos_token": {"content": "<eos>"}, "model_max_length": 10**30}
    config["chat_template"] = "{{ x }}<end_of_turn>"
    (tmp_path / "m/tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "m/generation_config.json").write_text('{"eos_token_id": 3}')
    read = hf_directory.read_hf_directory(tmp_path / "m", "float32")
    assert read.eos_token_ids == (1, 2, 3, 5, 7)

  def test_a_suspicious_rope_is_warned_about_and_read(self, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(hf_directory.logging, "warning", lambda form, *a: told.append(form % a))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    same(hf_directory.read_hf_directory(write(tmp_path / "m", rope_parameters=rope), "float32"))
    assert len(told) == 1 and str(tmp_path / "m") in told[0] and "dynamic" in told[0]


class TestWeights:
  def test_pickles_are_refused_with_advice(self, tmp_path):
    (write(tmp_path / "m") / "model.safetensors").unlink()
    (tmp_path / "m/pytorch_model.bin").write_bytes(b"\x80\x02")
    fails(tmp_path / "m", r"pickles \(pytorch_model.bin\).*safe_serialization=True")

  def test_missing_shards_are_named(self, tmp_path):
    write(tmp_path / "m", per_file=1)
    (tmp_path / "m/model.embed_tokens.weight.safetensors").unlink()
    fails(tmp_path / "m", "1 of its 21 shards are missing: model.embed_tokens.weight.safetensors")

  def test_a_tensor_that_is_not_where_the_index_says(self, tmp_path):
    write(tmp_path / "m", per_file=4)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = files[-1]
    (tmp_path / "m" / INDEX).write_text(json.dumps(index))
    fails(tmp_path / "m", f"{files[-1]}: tensor 'model.norm.weight', which the index puts there")

  @pytest.mark.parametrize("name", ["../m2/model.safetensors", "/etc/passwd", "", 5, None, ["a"]])
  def test_an_index_that_leads_out_of_the_directory(self, tmp_path, name):
    write(tmp_path / "m2")
    write(tmp_path / "m", per_file=99)
    (tmp_path / "m" / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    fails(tmp_path / "m", "which is no file of this directory")

  @pytest.mark.parametrize("weight_map", [{}, None, [], "x"])
  def test_an_index_of_nothing(self, tmp_path, weight_map):
    write(tmp_path / "m", per_file=99)
    (tmp_path / "m" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    fails(tmp_path / "m", "weight_map")

  def test_a_link_out_of_the_directory(self, tmp_path):
    write(tmp_path / "m2")
    path = write(tmp_path / "m") / "model.safetensors"
    path.unlink()
    path.symlink_to(tmp_path / "m2/model.safetensors")
    fails(tmp_path / "m", "is a link to .*m2/model.safetensors.*copy the file here")

  def test_the_same_tensor_in_two_files(self, tmp_path):
    write(tmp_path / "m").joinpath("model.safetensors").rename(tmp_path / "m/a.safetensors")
    save_file({"model.norm.weight": np.zeros(3)}, tmp_path / "m/b.safetensors")
    fails(tmp_path / "m", "'model.norm.weight' is in a.safetensors and in b.safetensors")

  def test_quantized_weights_that_no_config_tells_of(self, tmp_path):
    arrays = tensors()
    name = "model.layers.1.mlp.down_proj.weight"
    arrays[name] = arrays[name].astype(np.int8)
    fails(write(tmp_path / "m", arrays), f"'{name}' has dtype I8.*unquantized checkpoint")

  def test_scales_beside_the_weights(self, tmp_path):
    arrays = tensors() | {"model.layers.0.mlp.down_proj.SCB": np.zeros(3, np.uint8)}
    fails(write(tmp_path / "m", arrays), r"down_proj\.SCB' has dtype U8.*unquantized checkpoint")

  def test_fp8_that_only_a_side_file_tells_of(self, tmp_path):
    write(tmp_path / "m")
    side = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "m/hf_quant_config.json").write_text(json.dumps(side))
    fails(tmp_path / "m", r"hf_quant_config\.json.*FP8")

  def test_a_wrong_shape(self, tmp_path):
    arrays = tensors()
    arrays["model.layers.0.self_attn.k_proj.weight"] = np.zeros((16, 64), np.float32)
    fails(write(tmp_path / "m", arrays), r"k_proj.weight' has shape \(16, 64\).*\(48, 64\)")

  def test_another_dtype(self, tmp_path):
    arrays = tensors()
    arrays["lm_head.weight"] = arrays["lm_head.weight"].astype(np.float64)
    fails(write(tmp_path / "m", arrays), "'lm_head.weight' has dtype F64.*save it as F32")

  def test_a_file_that_shrinks_while_it_is_read(self, tmp_path):
    read = hf_directory.read_hf_directory(write(tmp_path / "m"), "float32")
    path = tmp_path / "m/model.safetensors"
    path.write_bytes(path.read_bytes()[:200_000])
    with pytest.raises(ValueError, match="model.safetensors ended while it was read"):
      [read.params[name] for name in read.params]


class TestJson:
  @pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000, '"x"'])
  def test_no_object(self, tmp_path, content):
    (write(tmp_path / "m") / "config.json").write_text(content)
    fails(tmp_path / "m", r"config\.json is not")


def header(entries, size=None):
  text = json.dumps(entries).encode()
  return struct.pack("<Q", len(text) if size is None else size) + text


class TestHeaders:
  def refused(self, tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.safetensors is truncated or corrupt"):
      shards.read_headers([path])

  @pytest.mark.parametrize("size", [0, 1, 50, 10**9, 2**40, 2**63, 2**64 - 1])
  def test_a_length_that_lies(self, tmp_path, size):
    entry = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    self.refused(tmp_path, header(entry, size) + b"\0" * 8)

  @pytest.mark.parametrize(
    "entry",
    [
      {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]},
      {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
      {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
      {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
      {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
      {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]},
      {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]},
      {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
      {"dtype": "F32"},
      [],
    ],
  )
  def test_an_entry_that_does_not_fit(self, tmp_path, entry):
    self.refused(tmp_path, header({"x": entry}) + b"\0" * 8)

  @settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
  )
  @given(
    changes=st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 3000) | st.none(),
  )
  def test_damaged_files_are_read_or_refused_in_bounded_memory(self, tmp_path, changes, cut):
    write(tmp_path / "m")
    path = tmp_path / "m/model.safetensors"
    content = bytearray(path.read_bytes())
    for at, value in changes:
      content[at] = value
    path.write_bytes(content[:cut])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
      params = hf_directory.read_hf_directory(tmp_path / "m", "float32").params
      assert all(params[name].shape == params.shapes[name] for name in params)
    except ValueError as error:
      assert str(tmp_path) in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
