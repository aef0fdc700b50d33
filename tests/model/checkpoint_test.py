"""The native format: what is saved comes back, and a save that fails leaves nothing."""

import dataclasses
import json
import shutil
import stat
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.model import native
from jaxserve.model.checkpoint import with_dtype
from jaxserve.model.native import is_checkpoint, restore, save
from jaxserve.model.random_llama import random_checkpoint


def tiny(**changes):
  checkpoint = random_checkpoint()
  return dataclasses.replace(
    checkpoint,
    tokenizer_json='{"added": "é"}',
    chat_template="{{ x }}\n",
    bos_token_id=3,
    **changes,
  )


class TestRoundTrip:
  def test_float32_is_exact(self, tmp_path):
    saved = tiny()
    save(tmp_path / "a", saved)
    read = restore(tmp_path / "a", "float32")
    for field in dataclasses.fields(saved):
      if field.name != "params":
        assert getattr(read, field.name) == getattr(saved, field.name)
    assert list(read.params) == list(saved.params)
    for name, array in saved.params.items():
      restored = read.params[name]
      assert restored.dtype == np.float32
      np.testing.assert_array_equal(restored, array)

  def test_bfloat16_is_the_rounding_of_the_same_weights(self, tmp_path):
    saved = tiny()
    save(tmp_path / "a", saved)
    read = restore(tmp_path / "a", "bfloat16")
    for name, array in saved.params.items():
      if array.ndim == 1:  # Norm gains.
        np.testing.assert_array_equal(read.params[name], array)
      else:
        np.testing.assert_array_equal(read.params[name], array.astype(ml_dtypes.bfloat16))

  def test_weights_exact_in_bfloat16_are_stored_so(self, tmp_path):
    saved = with_dtype(with_dtype(tiny(), "bfloat16"), "float32")
    save(tmp_path / "a", saved)
    (group,) = json.loads((tmp_path / "a" / "jaxserve.json").read_text())["arrays"]
    assert {array["dtype"] for array in group.values()} == {"bfloat16", "float32"}
    assert group["layers.0.qkv"]["dtype"] == "bfloat16"
    read = restore(tmp_path / "a", "float32")
    for name, array in saved.params.items():
      np.testing.assert_array_equal(read.params[name], array)

  def test_jax_arrays_can_be_saved(self, tmp_path):
    saved = tiny()
    params = {name: jnp.asarray(array) for name, array in saved.params.items()}
    save(tmp_path / "a", dataclasses.replace(saved, params=params))
    read = restore(tmp_path / "a", "float32")
    np.testing.assert_array_equal(read.params["embed"], saved.params["embed"])

  def test_arrays_are_read_in_groups(self, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_GROUP_BYTES", 80_000)
    save(tmp_path / "a", tiny())
    assert len(list((tmp_path / "a" / "params").iterdir())) > 2
    read = restore(tmp_path / "a", "float32")
    assert read.params.keys() == tiny().params.keys()

  def test_the_directory_is_private(self, tmp_path):
    save(tmp_path / "cache" / "models" / "a", tiny())
    for path in ("cache", "cache/models", "cache/models/a"):
      assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o700


class TestInterruption:
  @pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
  def test_a_save_that_fails_late_leaves_nothing(self, tmp_path, monkeypatch, error):
    def fail(*_):
      raise error

    monkeypatch.setattr(native, "_metadata", fail)
    with pytest.raises(error):
      save(tmp_path / "a", tiny())
    assert list(tmp_path.iterdir()) == []

  def test_what_a_killed_save_left_is_no_checkpoint(self, tmp_path):
    save(tmp_path / "a", tiny())
    (tmp_path / "a" / "jaxserve.json").unlink()  # Written last.
    assert not is_checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match="not a jaxserve checkpoint"):
      restore(tmp_path / "a", "float32")

  def test_an_existing_directory_is_not_touched(self, tmp_path):
    save(tmp_path / "a", tiny())
    before = (tmp_path / "a" / "jaxserve.json").read_bytes()
    with pytest.raises(FileExistsError, match="delete it"):
      save(tmp_path / "a", tiny(name="other"))
    assert (tmp_path / "a" / "jaxserve.json").read_bytes() == before

  def test_the_second_of_two_saves_at_once_gives_way(self, tmp_path, monkeypatch):
    metadata = native._metadata

    def meanwhile(*args):
      monkeypatch.setattr(native, "_metadata", metadata)
      save(tmp_path / "a", tiny(name="first"))
      return metadata(*args)

    monkeypatch.setattr(native, "_metadata", meanwhile)
    with pytest.raises(FileExistsError, match="another process"):
      save(tmp_path / "a", tiny(name="second"))
    assert restore(tmp_path / "a", "float32").name == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# Writes a checkpoint, and stops for good when all that is missing is its last file.
WRITER = """
import pathlib, sys, time
from jaxserve.model import native
from jaxserve.model.random_llama import random_checkpoint

def stop(*_):
  print("written", flush=True)
  time.sleep(600)

native._metadata = stop
native.save(pathlib.Path(sys.argv[1]), random_checkpoint())
"""


class TestKill:
  def test_a_killed_conversion_leaves_nothing_half_valid_and_can_be_run_again(self, tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "a")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
      assert writer.stdout.readline() == "written\n"
      (left,) = tmp_path.iterdir()
      assert left.name.startswith(".a.tmp-") and not is_checkpoint(left)
      save(tmp_path / "b", tiny())  # Another's scratch is not this one's.
      native.save(tmp_path / "a", tiny())  # While the other is at it: its scratch is left alone.
      assert left.exists()
      shutil.rmtree(tmp_path / "a")
      writer.kill()
    save(tmp_path / "a", tiny())
    assert not left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert restore(tmp_path / "a", "float32").name == "random"


class TestDamage:
  @pytest.fixture
  def saved(self, tmp_path):
    save(tmp_path / "a", tiny())
    return tmp_path / "a"

  def fails(self, path, match):
    with pytest.raises(ValueError, match=match) as caught:
      params = restore(path, "float32").params
      [params[name] for name in params]
    assert f"delete {path} and convert the model again" in str(caught.value)

  def test_missing_arrays(self, saved):
    for path in sorted((saved / "params").rglob("*"), reverse=True):
      path.unlink() if path.is_file() else path.rmdir()
    self.fails(saved, "is damaged")

  def test_a_flipped_bit_in_an_array_is_found(self, saved):
    found = 0
    for path in sorted((saved / "params").rglob("d/*")):
      content = bytearray(path.read_bytes())
      if len(content) > 10_000:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        found += 1
    assert found
    self.fails(saved, "its bytes are not those that were written|is damaged")

  def test_an_array_that_is_another_of_the_same_shape(self, saved):
    path = saved / "jaxserve.json"
    metadata = json.loads(path.read_text())
    arrays = metadata["arrays"][0]
    arrays["layers.0.o"], arrays["layers.1.o"] = arrays["layers.1.o"], arrays["layers.0.o"]
    path.write_text(json.dumps(metadata))
    self.fails(saved, r"layers\.0\.o: its bytes are not those that were written")

  def test_metadata_cut_short(self, saved):
    path = saved / "jaxserve.json"
    path.write_text(path.read_text()[:100])
    self.fails(saved, "is damaged")

  @pytest.mark.parametrize("change", [{"version": 99}, {"format": "other"}])
  def test_another_version(self, saved, change):
    path = saved / "jaxserve.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    self.fails(saved, "which this version reads")

  def test_a_missing_field(self, saved):
    path = saved / "jaxserve.json"
    metadata = json.loads(path.read_text())
    del metadata["config"]["vocab_size"]
    path.write_text(json.dumps(metadata))
    self.fails(saved, "vocab_size")


class TestCheckpoint:
  def params(self, **changes):
    return dict(random_checkpoint().params) | changes

  def test_a_missing_array_is_named(self):
    params = self.params()
    del params["layers.1.qkv"]
    with pytest.raises(ValueError, match=r"missing: layers\.1\.qkv"):
      tiny(params=params)

  def test_an_array_too_many_is_named(self):
    with pytest.raises(ValueError, match=r"no place for: layers\.0\.bias"):
      tiny(params=self.params(**{"layers.0.bias": np.zeros(3)}))

  def test_a_wrong_shape_is_named(self):
    with pytest.raises(ValueError, match=r"norm: its shape is \(3,\), not \(64,\)"):
      tiny(params=self.params(norm=np.zeros(3)))

  def test_a_wrong_dtype_is_named(self):
    with pytest.raises(ValueError, match="dtype='float16'"):
      with_dtype(tiny(), "float16")
