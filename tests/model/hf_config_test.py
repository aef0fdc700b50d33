"""config.json of the Llama family: what is read, and what is refused by name."""

import pytest

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.model.hf_config import eos_token_ids, model_config_from_hf, rope_config_from_hf

LLAMA_3_2_1B = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009],
  "head_dim": 64,
  "hidden_act": "silu",
  "hidden_size": 2048,
  "intermediate_size": 8192,
  "max_position_embeddings": 131072,
  "mlp_bias": False,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 16,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": True,
  "torch_dtype": "float16",
  "vocab_size": 128256,
}
LLAMA3_SCALING = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeConfig(theta=5e5, kind="llama3", factor=8.0)


class TestModelConfig:
  def test_reads_a_published_file(self):
    assert model_config_from_hf(LLAMA_3_2_1B) == ModelConfig(
      vocab_size=128256,
      hidden_size=2048,
      intermediate_size=8192,
      num_layers=16,
      num_heads=32,
      num_kv_heads=8,
      head_dim=64,
      rope=RopeConfig(theta=5e5, kind="llama3", factor=32.0),
      rms_norm_eps=1e-5,
      tie_word_embeddings=True,
      max_position=131072,
    )

  def test_head_dim_need_not_be_hidden_over_heads(self):
    config = {**LLAMA_3_2_1B, "head_dim": 128, "hidden_size": 1000}
    assert model_config_from_hf(config).head_dim == 128

  def test_absent_keys_take_the_defaults_of_llama(self):
    absent = ("head_dim", "num_key_value_heads", "tie_word_embeddings", "rope_scaling")
    config = {key: value for key, value in LLAMA_3_2_1B.items() if key not in absent}
    read = model_config_from_hf({**config, "head_dim": None})
    assert (read.head_dim, read.num_kv_heads) == (64, 32)
    assert not read.tie_word_embeddings and not read.is_encoder_decoder

  def test_the_encoder_decoder_flag_is_carried_over(self):
    assert model_config_from_hf({**LLAMA_3_2_1B, "is_encoder_decoder": True}).is_encoder_decoder

  @pytest.mark.parametrize(
    ("change", "named"),
    [
      ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
      ({"architectures": None, "model_type": "t5"}, "t5"),
      ({"attention_bias": True}, "attention_bias"),
      ({"mlp_bias": True}, "mlp_bias"),
      ({"hidden_act": "gelu"}, "gelu"),
      ({"quantization_config": {"load_in_8bit": True}}, "quantization_config"),
      ({"sliding_window": 4096}, "sliding_window"),
      ({"head_dim": None, "num_attention_heads": 31}, "num_attention_heads=31"),
      ({"hidden_size": "2048"}, "hidden_size='2048'"),
      ({"vocab_size": None}, "vocab_size=None"),
      ({"num_hidden_layers": 1.5}, "num_hidden_layers=1.5"),
    ],
  )
  def test_what_is_not_supported_is_named(self, change, named):
    with pytest.raises(ValueError, match=named):
      model_config_from_hf({**LLAMA_3_2_1B, **change})


class TestRope:
  @pytest.mark.parametrize(
    ("config", "want"),
    [
      ({"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING}, LLAMA3_ROPE),
      ({"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000}}, LLAMA3_ROPE),
      ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}, RopeConfig(theta=1e7)),
      ({"rope_parameters": {"rope_theta": 1e4}}, RopeConfig()),
      ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}}, RopeConfig(theta=1e6)),
      ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": None}}, RopeConfig(theta=1e6)),
      ({"rope_theta": 1e5, "rope_scaling": None}, RopeConfig(theta=1e5)),
      ({"rope_scaling": {"type": "default", "rope_type": "default"}}, RopeConfig()),
      ({}, RopeConfig()),
    ],
  )
  def test_both_spellings(self, config, want):
    assert rope_config_from_hf(config) == want

  def test_the_legacy_key_is_the_same(self):
    scaling = {key: value for key, value in LLAMA3_SCALING.items() if key != "rope_type"}
    config = {"rope_theta": 5e5, "rope_scaling": {**scaling, "type": "llama3"}}
    assert rope_config_from_hf(config) == LLAMA3_ROPE

  @pytest.mark.parametrize(
    ("scaling", "named"),
    [
      ({"type": "linear", "factor": 4.0}, "linear"),
      ({"type": "yarn", "factor": 4.0}, "yarn"),
      ({"type": "dynamic", "factor": 2.0}, "dynamic"),
      ({"type": "su", "short_factor": [1.0], "long_factor": [1.0]}, "su"),
      ({"rope_type": "foo"}, "foo"),
      ({**LLAMA3_SCALING, "type": "linear"}, "rope_type='llama3' and type='linear'"),
      ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
      ({"full_attention": {"rope_theta": 1e6}}, "full_attention"),
      ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
  )
  def test_another_scaling_is_refused_never_ignored(self, scaling, named):
    with pytest.raises(ValueError, match=named):
      rope_config_from_hf({"rope_scaling": scaling})


class TestEos:
  @pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
      ({"eos_token_id": 2}, None, (2,)),
      ({"eos_token_id": 1}, {"eos_token_id": [1, 8, 9]}, (1, 8, 9)),
      ({"eos_token_id": [5, 3]}, {"eos_token_id": 7}, (5, 3, 7)),
      ({"eos_token_id": None}, {}, ()),
    ],
  )
  def test_it_is_the_union_of_both_files(self, config, generation, want):
    assert eos_token_ids(config, generation) == want
