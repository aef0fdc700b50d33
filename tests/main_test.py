"""The command line: flags, exit codes, and the whole job on the random model."""

import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import types

import httpx
import pytest

from jaxserve import config, main
from jaxserve.engine import defaults, profiles
from tests.cost_profile_test import PROFILE
from tests.testing.caches import cache_dir
from tests.testing.engines import MODEL

# Small enough to compile in seconds; the bucket table still covers chunked and unchunked.
SMALL = ("--model=random", "--max_model_len=192", "--max_num_seqs=11", "--kv_cache_tokens=4096")
RUN = (*SMALL, "--budget=32", "--dtype=float32")  # one engine for all tests that run


CACHE = f"--cache_dir={cache_dir()}"


def jaxserve(*flags, timeout=300):
  command = [sys.executable, "-m", "jaxserve.main", CACHE, *flags]
  return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_help_imports_no_jax():
  code = "import sys, jaxserve.main; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
  shown = jaxserve("--help")
  assert shown.returncode == 0
  assert "--budget" in shown.stdout and "--long_prefill_token_threshold" in shown.stdout


# Flags -> what the message must name.
BAD_FLAGS = {
  "budget_below_seats": (["--budget=4", "--max_num_seqs=8"], ["--budget", "--max_num_seqs"]),
  "budget_zero": (["--budget=0"], ["budget", "0"]),
  "seats_zero": (["--max_num_seqs=0"], ["max_num_seqs", "0"]),
  "page_size_negative": (["--page_size=-1"], ["page_size", "-1"]),
  "unchunked_budget": (
    ["--nochunked_prefill", "--budget=128", "--max_model_len=512"], ["--budget", "--max_model_len"],
  ),
  "threshold": (
    ["--long_prefill_token_threshold=999", "--max_model_len=512"],
    ["--long_prefill_token_threshold"],
  ),
  "both_sizes": (["--kv_cache_tokens=64", "--memory_fraction=0.5"], ["--kv_cache_tokens"]),
  "fraction": (["--memory_fraction=1.5"], ["memory_fraction"]),
  "policy_twice": (["--compare=sarathi,vllm_v1,sarathi"], ["compare", "sarathi", "once"]),
  "target_and_budget": (["--itl_slo_ms=50", "--budget=64"], ["--itl_slo_ms", "--budget", "both"]),
  "target_zero": (["--itl_slo_ms=0"], ["itl_slo_ms", "0", "positive"]),
  "target_unchunked": (["--itl_slo_ms=50", "--nochunked_prefill"], ["--itl_slo_ms", "chunked"]),
  "context_alone": (["--itl_slo_context=50"], ["--itl_slo_context", "--itl_slo_ms"]),
  "target_too_low": (
    [*SMALL, "--itl_slo_ms=0.0001"],
    ["itl_slo_ms=0.0001", "10 decodes", "raise itl_slo_ms to", "or lower max_num_seqs"],
  ),
  "attention": (
    [*SMALL, "--attention_backend=mosaic_gpu"], ["attention='mosaic_gpu'", "'cpu'", "'auto'"],
  ),
  "drafter": (["--model=random", "--speculate=eagle:k=4"], ["'eagle'", "ngram:k=4"]),
  "port": (["--mode=serve", "--port=70000"], ["port", "70000"]),
  "host": (["--mode=serve", "--host=256.0.0.1"], ["host=256.0.0.1", "bound"]),
  "no_prompt": (["--mode=generate"], ["--prompt"]),
  "no_target": (["--mode=convert", "--model=random"], ["--mode=convert", "--out"]),
  "unknown_flag": (["--bugdet=5"], ["bugdet"]),
  "stray_argument": (["1536"], ["1536"]),
  "unknown_model": (["--model=/no/such/model"], ["/no/such/model", "smollm2-135m"]),
  "model_too_short": (["--model=random", "--max_model_len=999999"], ["max_model_len=999999"]),
  "pool_below_a_page": (["--model=random", "--kv_cache_tokens=3"], ["kv_cache_tokens=3"]),
  "empty_prompt_too_long": (
    [*RUN, "--mode=generate", "--prompt=" + "long " * 100], ["max_model_len=192"],
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_a_mistake_exits_with_2_and_one_clear_message(name):
  flags, words = BAD_FLAGS[name]
  done = jaxserve(*flags)
  assert done.returncode == 2, done.stderr
  assert "Traceback" not in done.stderr
  assert all(word in done.stderr for word in words), done.stderr


def test_a_truncated_gguf_exits_with_2(tmp_path):
  path = tmp_path / "broken.gguf"
  path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
  done = jaxserve(f"--model={path}", f"--cache_dir={tmp_path / 'cache'}")
  assert done.returncode == 2 and "broken.gguf" in done.stderr and "Traceback" not in done.stderr


def test_convert_and_what_it_says_the_second_time(tmp_path):
  done = jaxserve("--mode=convert", "--model=random", f"--out={tmp_path / 'm'}")
  assert done.returncode == 0, done.stderr
  document = json.loads(done.stdout.splitlines()[-1])
  assert document["model"] == "random" and document["out"] == str(tmp_path / "m")
  again = jaxserve("--mode=convert", "--model=random", f"--out={tmp_path / 'm'}")
  assert again.returncode == 2 and "delete it to convert again" in again.stderr


RUN_KEYS = {
  "name", "policy", "budget", "chunked_prefill", "steps", "p50_itl_ms", "p99_itl_ms", "max_itl_ms",
  "p50_ttft_ms", "p99_ttft_ms", "long_prompt_ttft_ms", "longest_stall_ms", "output_throughput",
  "padding_fraction", "preemptions",
}  # fmt: skip


def test_replay_on_the_random_model(tmp_path):
  done = jaxserve(*RUN, f"--out={tmp_path}")
  assert done.returncode == 0, done.stderr
  document = json.loads(done.stdout.splitlines()[-1])
  assert document["model"] == "random" and document["retraces"] == 0
  assert document["tokens_equal"] is True
  assert set(document["startup"]) == {"import_s", "load_s", "compile_s", "first_step_s", "buckets"}
  chunked, whole = document["runs"]
  assert RUN_KEYS <= set(chunked) and RUN_KEYS <= set(whole)
  assert (chunked["budget"], chunked["chunked_prefill"]) == (32, True)
  assert (whole["budget"], whole["chunked_prefill"]) == (192, False)
  assert json.loads((tmp_path / "result.json").read_text()) == document
  assert "<svg" in (tmp_path / "report.html").read_text()
  lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
  assert (lines[0]["event"], lines[0]["model"]) == ("header", "random")
  assert sum(line["event"] == "submit" for line in lines) == 22
  steps = [line for line in lines if line["event"] == "step"]
  assert len(steps) == chunked["steps"] + whole["steps"]
  assert all(s["num_tokens"] <= s["budget"] for s in steps)
  assert (cache_dir() / "executables").stat().st_mode & 0o777 == 0o700
  command = [sys.executable, "-m", "experiments.plans", "replay", str(tmp_path / "steps.jsonl")]
  command.append(CACHE)
  again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
  assert again.returncode == 0, again.stdout + again.stderr
  assert again.stdout.count("bit by bit") == 2 and "not promised" not in again.stderr


def test_policies_side_by_side(tmp_path):
  done = jaxserve(
    *RUN, f"--out={tmp_path}",
    "--policy=sarathi_dynamic", "--policy_args=high=64,low=32,max_tokens=192",
    "--compare=sarathi_dynamic,prefill_first",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  document = json.loads(done.stdout.splitlines()[-1])
  assert document["retraces"] == 0 and document["tokens_equal"] and document["near_ties"] == 0
  runs = [(run["name"], run["policy"], run["budget"]) for run in document["runs"]]
  assert runs == [("sarathi_dynamic",) * 2 + (32,), ("prefill_first",) * 2 + (192,)]
  command = [sys.executable, "-m", "experiments.plans", "replay", str(tmp_path / "steps.jsonl")]
  command.append(CACHE)
  again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
  assert again.returncode == 0, again.stdout + again.stderr
  assert again.stdout.count("bit by bit") == 2


def test_the_reference_case_on_a_known_gpu(monkeypatch):
  flag = lambda value: types.SimpleNamespace(value=value)
  monkeypatch.setattr(main, "_ITL_SLO_MS", flag(60.0))
  monkeypatch.setattr(main, "_ITL_SLO_CONTEXT", flag(None))
  monkeypatch.setattr(main, "_DTYPE", flag("bfloat16"))
  monkeypatch.setattr(main, "_PROFILE", flag(None))
  llama = config.ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336,
    num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
  )  # fmt: skip
  load = defaults.Load(
    decoders=32, context=2048, max_prefix=32768, page_size=64, max_budget=16384
  )  # fmt: skip
  h100 = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", platform="gpu")
  assert main._solve_budget(llama, h100, load) == 832
  assert main._solve_budget(llama, h100, dataclasses.replace(load, max_budget=512)) == 512
  monkeypatch.setattr(main, "_ITL_SLO_CONTEXT", flag(8192))
  assert main._solve_budget(llama, h100, load) == 704


def test_a_profile_takes_the_place_of_the_table(monkeypatch, tmp_path):
  """For the solved budget, and for what slo_aware predicts with."""
  path = tmp_path / "profile.json"
  profile = dataclasses.replace(PROFILE, num_params=MODEL.num_params, dtype="float32")
  profiles.save(path, profile)
  values = {
    "_ITL_SLO_MS": 30.0, "_ITL_SLO_CONTEXT": None, "_DTYPE": "float32", "_PROFILE": str(path),
    "_POLICY": "slo_aware", "_POLICY_ARGS": ["itl_target_ms=30", "min_chunk=8"],
  }  # fmt: skip
  for name, value in values.items():
    monkeypatch.setattr(main, name, types.SimpleNamespace(value=value))
  load = defaults.Load(decoders=8, context=100, max_prefix=500, page_size=16, max_budget=4096)
  budget = main._solve_budget(MODEL, None, load)
  chunk = budget - 8
  worst = lambda c: 5e-5 * (c + 8) + 4e-9 * c * (500 + c / 2) + 3e-7 * 800 + profile.overhead_s(8)
  assert worst(chunk) <= 0.03 < worst(chunk + 16)
  arguments = main._policy_args()
  assert arguments["token_ms"] == 0.05 and arguments["min_chunk"] == 8
  assert abs(arguments["itl_target_ms"] - (30 - 1e3 * profile.overhead_s(32))) < 1e-9
  monkeypatch.setattr(main, "_POLICY_ARGS", types.SimpleNamespace(value=["itl_target_ms=5"]))
  with pytest.raises(ValueError, match="itl_target_ms=5: by --profile a step takes 11.6 ms"):
    main._policy_args()
  monkeypatch.setattr(main, "_POLICY", types.SimpleNamespace(value="vllm_v1"))
  assert main._policy_args() == {"itl_target_ms": 5}
  with pytest.raises(ValueError, match="profile: was measured with some"):
    main._solve_budget(dataclasses.replace(MODEL, num_layers=9), None, load)


def test_a_profile_that_cannot_be_read_exits_with_2_before_anything_is_loaded(tmp_path):
  done = jaxserve("--model=random", f"--profile={tmp_path / 'none.json'}")
  assert done.returncode == 2 and "none.json: cannot be read" in done.stderr
  assert "Traceback" not in done.stderr


def test_the_budget_is_solved_for_a_target():
  done = jaxserve(
    "--model=random", "--max_model_len=32", "--max_num_seqs=2", "--kv_cache_tokens=256",
    "--mode=generate", "--prompt=Hi", "--max_tokens=2",
    "--itl_slo_ms=5000", "--itl_slo_context=24",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout.splitlines()[-1])["retraces"] == 0
  for words in (
    "this cpu: ", "GB/s achieved", "keeps the target of 5000 ms", "prefix of 32 tokens",
    "KV of 1 requests at 24 tokens", "Binding is ", "the budget is 64",
    "Token budget 64 a step, 2 seats",
  ):  # fmt: skip
    assert words in done.stderr, done.stderr


def test_generate_on_the_random_model():
  done = jaxserve(*RUN, "--mode=generate", "--prompt=Hello", "--max_tokens=5")
  assert done.returncode == 0, done.stderr
  document = json.loads(done.stdout.splitlines()[-1])
  assert document["completion_tokens"] == 5 and document["retraces"] == 0


def test_a_port_that_is_taken():
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    done = jaxserve("--mode=serve", f"--port={port}", "--model=random")
  assert done.returncode == 2 and f"port={port}" in done.stderr and "Traceback" not in done.stderr


def test_without_the_extra_serve_says_what_to_install():
  code = "import sys; sys.modules['msgspec'] = None; import jaxserve.main as m; m.run()"
  command = [sys.executable, "-c", code, "--mode=serve"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
  assert done.returncode == 2 and "Traceback" not in done.stderr
  assert "msgspec" in done.stderr and "pip install 'jaxserve[serve]'" in done.stderr


def test_serve_until_a_signal():
  command = [sys.executable, "-m", "jaxserve.main", CACHE, *RUN, "--mode=serve", "--port=0"]
  server = subprocess.Popen([*command, "--api_key=secret"], stderr=subprocess.PIPE, text=True)
  try:
    seen = []
    for line in server.stderr:
      seen.append(line)
      if match := re.search("Serving random on (http://.*)", line):
        break
    else:
      raise AssertionError("".join(seen))
    key = {"authorization": "Bearer secret"}
    body = {"prompt": "Hi", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=match[1], headers=key, timeout=60) as client:
      with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        next(lines)
        server.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    assert server.wait(60) == 0
    log = "".join(seen) + server.stderr.read()
    assert "SIGTERM" in log and "Traceback" not in log and "secret" not in log
  finally:
    server.kill()
    server.wait()
    server.stderr.close()
