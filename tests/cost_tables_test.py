"""Models and devices by name, and models counted from a config.json."""

import pytest

from jaxserve import config, cost, cost_tables

# Parameters that the publishers state, in their own digits.
PUBLISHED = {
  "smollm2-135m": 134_515_008,
  "smollm2-360m": 361_821_120,
  "tinyllama-1.1b": 1_100_048_384,
  "llama3.2-1b": 1_235_814_400,
  "llama3.2-3b": 3_212_749_824,
  "llama2-7b": 6_738_415_616,
  "mistral-7b": 7_241_732_096,
  "qwen2.5-7b": 7_615_616_512,
  "llama3-8b": 8.03e9,
  "qwen3-8b": 8_190_735_360,
  "mistral-nemo-12b": 12_247_782_400,
  "qwen3-14b": 14_768_307_200,
  "qwen3-32b": 32_762_123_264,
  "llama3-70b": 70_553_706_496,
}

LLAMA3_8B = {
  "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
  "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
  "tie_word_embeddings": False,
}  # fmt: skip
QWEN25_7B = {
  "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
  "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
  "sliding_window": 131072, "use_sliding_window": False,
}  # fmt: skip
QWEN3_32B = {
  "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
  "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
  "attention_bias": False, "sliding_window": None,
}  # fmt: skip


def test_parameters_are_the_published_ones():
  assert {name: model.num_params for name, model in cost_tables.MODELS.items()} == PUBLISHED


@pytest.mark.parametrize(
  ("name", "published"), [("llama3-8b", LLAMA3_8B), ("qwen2.5-7b", QWEN25_7B),
                          ("qwen3-32b", QWEN3_32B)],
)  # fmt: skip
def test_a_config_json_gives_the_model_of_the_table(name, published):
  counted, listed = cost_tables.model_of_config(published), cost_tables.find_model(name)
  assert counted.num_params == pytest.approx(listed.num_params, rel=1e-4)
  assert cost.kv_bytes_per_token(counted) == cost.kv_bytes_per_token(listed)
  assert cost.attention_flops(counted, 512, 64) == cost.attention_flops(listed, 512, 64)


def test_the_table_counts_as_a_configured_model_does():
  smollm2 = config.ModelConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, tie_word_embeddings=True,
  )  # fmt: skip
  assert cost.ModelCost.of(smollm2) == cost_tables.find_model("smollm2-135m")


def test_biases_of_a_llama_are_counted():
  plain = cost_tables.model_of_config(LLAMA3_8B).num_params
  biased = cost_tables.model_of_config(LLAMA3_8B | {"attention_bias": True}).num_params
  assert biased - plain == 32 * (4096 + 2 * 1024 + 4096)


BAD_CONFIGS = {
  "architecture": ({"model_type": "gpt2"}, "model_type='gpt2'.*llama"),
  "missing": ({"hidden_size": None}, "hidden_size=None: a whole number"),
  "wrong": ({"num_hidden_layers": "many"}, "num_hidden_layers='many'"),
  "experts": ({"num_local_experts": 8}, "num_local_experts=8: only dense"),
  "window": ({"sliding_window": 4096}, "sliding_window=4096: only full attention"),
  "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "bytes_per_param=1"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_model_that_the_formulas_do_not_describe_is_refused(name):
  change, words = BAD_CONFIGS[name]
  with pytest.raises(ValueError, match=words):
    cost_tables.model_of_config(LLAMA3_8B | change)


def test_a_quantized_model_is_counted_once_its_bytes_are_known():
  fp8 = LLAMA3_8B | {"quantization_config": {"quant_method": "fp8"}}
  assert cost.weight_bytes(cost_tables.model_of_config(fp8, 1)) == pytest.approx(8.03e9, rel=1e-4)
  assert cost.kv_bytes_per_token(cost_tables.model_of_config(fp8, 1, kv_bytes=1)) == 65536


def test_unknown_names_list_what_there_is():
  with pytest.raises(ValueError, match="model='gpt5'.*llama3-8b.*config.json"):
    cost_tables.find_model("gpt5")
  with pytest.raises(ValueError, match="hardware='z80'.*h100"):
    cost_tables.find_device("z80")


def test_devices_achieve_less_than_their_data_sheets_and_say_why():
  assert set(cost_tables.DEVICES) == {"h100", "h200", "a100", "l40s", "b200"}
  for device in cost_tables.DEVICES.values():
    hardware = device.hardware
    assert hardware.flops < hardware.spec_flops and hardware.bandwidth < hardware.spec_bandwidth
    assert "not measured" in device.achieved
  assert cost_tables.find_device("h100").hardware is cost.H100


def test_only_the_exact_device_is_recognised():
  device = cost_tables.device_of_kind("NVIDIA H100 80GB HBM3")
  assert device is cost_tables.find_device("h100")
  assert cost_tables.device_of_kind("NVIDIA H100 PCIe") is None
  assert cost_tables.device_of_kind("cpu") is None
