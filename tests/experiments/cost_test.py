"""`python -m experiments.cost`: the reference case to the digit, other cases, mistakes."""

import json
import subprocess
import sys

import pytest


def run(*arguments):
  command = [sys.executable, "-m", "experiments.cost", *map(str, arguments)]
  return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def reference():
  done = run("--model", "llama3-8b", "--hardware", "h100")
  assert done.returncode == 0, done.stderr
  return done.stdout, json.loads(done.stdout.splitlines()[-1])


# key, divisor, as it is printed, format
TABLE = [
  ("weight_bytes", 1e9, "16.06", ".2f"),
  ("kv_bytes_per_token", 1, "131072", ".0f"),
  ("gemm_tflop", 1, "526", ".0f"),
  ("attention_tflop", 1, "281", ".0f"),
  ("prefill_tflop", 1, "807.7", ".1f"),
  ("prefill_s", 1, "1.615", ".3f"),
  ("resident_kv_gb", 1, "8.59", ".2f"),
  ("decode_gb", 1, "24.65", ".2f"),
  ("decode_ms", 1, "9.48", ".2f"),
  ("spike", 1, "170", ".0f"),
  ("spike_over_limit", 1, "32", ".0f"),
  ("chunks", 1, "17", ".0f"),
  ("last_chunk_tokens", 1, "512", ".0f"),
  ("first_chunk_ms", 1, "70", ".0f"),
  ("last_full_chunk_ms", 1, "134", ".0f"),
  ("decoders_kv_ms", 1, "3.3", ".1f"),
  ("riding_decodes_ms", 1, "56", ".0f"),
  ("gemm_rows_ms", 1, "1.0", ".1f"),
  ("piggyback_ms", 1, "4.3", ".1f"),
  ("piggyback_saving", 1, "2.2", ".1f"),
  ("prefill_slot_us", 1, "33.2", ".1f"),
  ("decode_slot_ms", 1, "1.84", ".2f"),
  ("kv_reread_gb", 1, "2.15", ".2f"),
  ("weight_reread_gb", 1, "16.06", ".2f"),
  ("crossover_tokens", 1e3, "245", ".0f"),
  ("reread_share", 1, "53%", ".0%"),
  ("ridge_spec", 1, "295", ".0f"),
  ("ridge_achieved", 1, "192", ".0f"),
  ("ridge_tokens", 1, "192", ".0f"),
  ("budget_exact", 1, "1572", ".0f"),
  ("budget_gemm_only", 1, "1536", ".0f"),
  ("budget_worst_chunk", 1, "832", ".0f"),
  ("worst_chunk_ms", 1, "57.9", ".1f"),
  ("next_page_ms", 1, "62.2", ".1f"),
]


@pytest.mark.parametrize(("key", "divisor", "shown", "spec"), TABLE, ids=[row[0] for row in TABLE])
def test_reference_case(reference, key, divisor, shown, spec):
  assert format(reference[1][key] / divisor, spec) == shown


def test_every_number_stands_beside_its_formula(reference):
  text = reference[0]
  for words in (
    "16.06 GB", "131,072 B", "526.3 + 281.5 = 807.7 TFLOP", "1.615 s", "9.48 ms", "170x; 32x",
    "17, the last with 512 tokens", "70.2 ms", "134.1 ms", "17 * 3.3 = 56 ms",
    "1.0 + 3.3 = 4.3 ms, 2.2x cheaper", "33.2 us", "1.84 ms", "2.15 GB", "at 131,072 KV is 53%",
    "295 FLOP/B by specification, 192 achieved", "1,572 -> 1,536 tokens",
    "832 tokens: 57.9 ms, a page more 62.2 ms",
    "2*P*S + 2*L*h*d*S^2", "ceil(S / (budget - rows))", "2*P*b / k", "not measured here",
  ):  # fmt: skip
    assert words in text
  lines = text.splitlines()[3:-1]
  assert all(len(line[36:].split("  ")) >= 2 for line in lines), (
    "a value and a formula on each line"
  )


def test_a_config_json_and_another_device(tmp_path):
  path = tmp_path / "config.json"
  path.write_text(json.dumps({
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 151936,
  }))  # fmt: skip
  flags = ("--hardware=a100", "--prompt=8192", "--context=512", "--itl_ms=80")
  by_path, by_folder, by_name = (
    json.loads(run("--model", name, *flags).stdout.splitlines()[-1])
    for name in (path, tmp_path, "qwen3-8b")
  )
  assert by_path.pop("model") == str(path) and by_folder.pop("model") == str(tmp_path)
  assert by_name.pop("model") == "qwen3-8b"
  assert by_path == by_folder == by_name and by_name["hardware"] == "A100 SXM 80GB"


def test_a_model_too_large_for_the_device_is_noted():
  done = run("--model=llama3-70b", "--itl_ms=300")
  assert done.returncode == 0 and "do not fit the 80 GB of one H100 SXM" in done.stdout
  fp8 = run("--model=llama3-70b", "--itl_ms=300", "--bytes_per_param=1", "--kv_bytes=1")
  document = json.loads(fp8.stdout.splitlines()[-1])
  assert document["weight_bytes"] == 70553706496 and "do not fit" in fp8.stdout


def test_this_machine_is_measured():
  done = run("--model=smollm2-135m", "--hardware=this", "--prompt=2048", "--itl_ms=1")
  assert done.returncode == 0, done.stderr
  document = json.loads(done.stdout.splitlines()[-1])
  assert document["hardware"].startswith("this ") and "measured now" in done.stdout
  assert document["ridge_spec"] > 0 and document["prefill_s"] > 0


MISTAKES = {
  "model": (["--model=gpt5"], ["model='gpt5'", "llama3-8b"]),
  "hardware": (["--hardware=z80"], ["hardware='z80'", "h100"]),
  "no_file": (["--model=/no/such/config.json"], ["/no/such/config.json", "cannot read"]),
  "budget": (["--budget=32"], ["budget=32", "decoders=32", "raise budget"]),
  "prompt": (["--prompt=0"], ["prompt=0"]),
  "decoders": (["--decoders=0"], ["decoders=0", "at least 1"]),
  "page": (["--page=0"], ["page=0", "at least 1"]),
  "target": (["--itl_ms=-5"], ["itl_ms=-5", "positive"]),
  "limit": (["--limit_ms=0"], ["limit_ms"]),
  "unknown": (["--bugdet=1"], ["bugdet"]),
  "stray": (["llama3-8b"], ["llama3-8b", "--flag"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_exit_with_2_and_one_clear_message(name):
  flags, words = MISTAKES[name]
  done = run(*flags)
  assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
  assert all(word in done.stderr for word in words), done.stderr
  assert len(done.stderr.strip().splitlines()) == 1
