"""config.json of the Llama family: what is read, and what is refused by name."""

import math

import pytest

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.model.hf_config import eos_token_ids, model_config_from_hf
from jaxserve.model.hf_rope import rope_config_from_hf, rope_warnings

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
      ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
      ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'"),
      ({"architectures": None, "model_type": "t5"}, "t5"),
      ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias"),
      ({"architectures": ["Qwen2ForCausalLM"], "mlp_bias": True}, "mlp_bias"),
      ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": None}, "num_key_value"),
      (
        {"architectures": ["MistralForCausalLM"], "layer_types": ["linear_attention"] * 16},
        "layer_types='linear_attention'",
      ),
      (
        {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": []},
        "must have 16 entries",
      ),
      ({"num_experts": 8}, "num_experts"),
      ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
      ({"eos_token_id": 1, "vocab_size": float("inf")}, "vocab_size=inf"),
      ({"hidden_act": "gelu"}, "gelu"),
      ({"quantization_config": {"load_in_8bit": True}}, "quantization_config"),
      ({"sliding_window": 4096}, "sliding_window"),
      ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
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
      ({"rope_type": "foo"}, "foo"),
      ({"rope_type": ["yarn"]}, "rope_type"),
      ({"rope_type": "proportional"}, "proportional"),
      ({**LLAMA3_SCALING, "type": "linear"}, "rope_type='llama3' and type='linear'"),
      ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
      ({"rope_type": "linear"}, "factor=None"),
      ({"rope_type": "linear", "factor": 0}, "factor=0.0: must be positive"),
      ({"rope_type": "longrope", "short_factor": [1.0]}, "long_factor=None"),
      ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": ["x"]}, "long_factor='x'"),
      ({"full_attention": {"rope_theta": 1e6}}, "full_attention"),
      ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
      ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "mrope_section"),
    ],
  )
  def test_another_scaling_is_refused_never_ignored(self, scaling, named):
    with pytest.raises(ValueError, match=named):
      rope_config_from_hf({"rope_scaling": scaling})

  def test_a_partial_rotation_beside_the_section_is_seen_too(self):
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.25"):
      rope_config_from_hf({"partial_rotary_factor": 0.25, "rope_parameters": {"rope_theta": 1e7}})

  def test_factors_must_fit_the_head(self):
    scaling = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
    with pytest.raises(ValueError, match="short_factor=.*head_dim / 2 = 32"):
      model_config_from_hf({**LLAMA_3_2_1B, "rope_scaling": scaling})


class TestScaling:
  def test_linear_by_either_key_or_both(self):
    want = RopeConfig(kind="linear", factor=4.0)
    for keys in (
      {"type": "linear"},
      {"rope_type": "linear"},
      {"rope_type": "linear", "type": "linear"},
    ):
      assert rope_config_from_hf({"rope_scaling": {**keys, "factor": 4.0}}) == want

  def test_yarn_stretches_the_context_of_training(self):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = model_config_from_hf(
      {**LLAMA_3_2_1B, "max_position_embeddings": 32768, "rope_scaling": yarn}
    )
    assert config.max_position == 131072
    assert config.rope.kind == "yarn" and config.rope.original_max_position == 32768
    assert config.rope.attention_scale == pytest.approx(0.1 * math.log(4) + 1)

  @pytest.mark.parametrize(
    ("change", "scale"),
    [
      ({"attention_factor": 1.5}, 1.5),
      ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
      ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
      ({"factor": 1.0}, 1.0),
    ],
  )
  def test_how_yarn_scales_attention(self, change, scale):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | change
    assert rope_config_from_hf({"rope_scaling": yarn}).attention_scale == pytest.approx(scale)

  @pytest.mark.parametrize("name", ["su", "longrope", "yarn"])
  def test_phi3_by_all_its_names(self, name):
    scaling = {"type": name, "short_factor": [1.0, 1.5], "long_factor": [2.0, 4]}
    rope = rope_config_from_hf(
      {
        "model_type": "phi3",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": scaling,
      }
    )
    assert (rope.kind, rope.original_max_position) == ("longrope", 4096)
    assert (rope.short_factor, rope.long_factor) == ((1.0, 1.5), (2.0, 4.0))
    assert rope.attention_scale == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))

  def test_dynamic_is_served_where_it_is_exact(self):
    config = {**LLAMA_3_2_1B, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert model_config_from_hf(config).rope == RopeConfig(theta=5e5)
    assert any("dynamic" in warning for warning in rope_warnings(config))


class TestWarnings:
  def test_a_good_file_has_none(self):
    assert rope_warnings(LLAMA_3_2_1B) == []

  @pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 8.0}])
  def test_a_llama_3_1_without_its_scaling(self, scaling):
    (warning,) = rope_warnings({**LLAMA_3_2_1B, "rope_scaling": scaling})
    assert "Llama 3.1" in warning and "copy rope_scaling from the original" in warning

  def test_two_bases(self):
    (warning,) = rope_warnings({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}})
    assert "rope_theta=10000.0" in warning and "1000000.0 is used" in warning

  def test_two_sections(self):
    config = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3_SCALING}
    (warning,) = rope_warnings(config)
    assert "rope_parameters (default) and rope_scaling (llama3)" in warning


class TestWindow:
  MISTRAL = {**LLAMA_3_2_1B, "architectures": ["MistralForCausalLM"]}
  QWEN = {**LLAMA_3_2_1B, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}

  def test_an_absent_key_is_not_null(self):
    assert model_config_from_hf(self.MISTRAL).sliding_window == 4096
    assert model_config_from_hf({**self.MISTRAL, "sliding_window": None}).sliding_window is None

  def test_qwen_needs_a_second_key_and_has_it_in_its_last_layers(self):
    assert model_config_from_hf(self.QWEN).sliding_window is None
    used = {**self.QWEN, "use_sliding_window": True}
    config = model_config_from_hf({**used, "max_window_layers": 14})
    assert config.sliding_window == 64 and config.mixes_windows
    assert [config.window(i) for i in (0, 13, 14, 15)] == [None, None, 64, 64]
    assert model_config_from_hf({**used, "max_window_layers": 28}).sliding_window is None

  def test_by_layer_types(self):
    types = ["full_attention", "sliding_attention"] * 8
    used = {**self.QWEN, "use_sliding_window": True, "layer_types": types}
    assert model_config_from_hf(used).full_layers == tuple(range(0, 16, 2))


class TestEos:
  @pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
      ({"eos_token_id": 2}, None, (2,)),
      ({"eos_token_id": 1}, {"eos_token_id": [1, 8, 9]}, (1, 8, 9)),
      ({"eos_token_id": [5, 3]}, {"eos_token_id": 7}, (5, 3, 7)),
      ({"eos_token_id": None}, {}, ()),
      ({"eos_token_id": 2.0}, {}, (2,)),
    ],
  )
  def test_it_is_the_union_of_both_files(self, config, generation, want):
    assert eos_token_ids(config, generation) == want
