"""`python -m experiments.solve`: the reference case, its plot, and targets that cannot be met."""

import json
import re
import subprocess
import sys

import pytest

from jaxserve.engine import profiles
from tests.cost_profile_test import PROFILE

REFERENCE = (
  "--model", "llama3-8b", "--hardware", "h100", "--itl_ms", "60", "--decoders", "32",
  "--context", "2048", "--max_prefix", "32768", "--page", "64",
)  # fmt: skip


def run(*arguments):
  command = [sys.executable, "-m", "experiments.solve", *map(str, arguments)]
  return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_reference_case(tmp_path):
  done = run(*REFERENCE, "--out", tmp_path / "new")
  assert done.returncode == 0, done.stderr
  document = json.loads(done.stdout.splitlines()[-1])
  assert document["budget_gemm_only"] == 1536 and document["budget_worst_chunk"] == 832
  assert document["ridge_tokens"] == 192 and document["binding"] == "attention"
  chosen, more, rule = (document[f"at_{x}"] for x in ("worst_chunk", "next_page", "gemm_only"))
  assert (chosen["budget"], more["budget"], rule["budget"]) == (832, 896, 1536)
  assert format(chosen["itl_ms"], ".1f") == "57.9" and format(more["itl_ms"], ".1f") == "62.2"
  assert chosen["ttft_s"] > rule["ttft_s"] > 1.615 and chosen["chunks"] == 41
  assert chosen["output_tokens_per_s"] > rule["output_tokens_per_s"]
  assert "Binding is attention" in done.stdout and "pays for its own weight stream" in done.stdout
  drawing = (tmp_path / "new" / "itl.svg").read_text()
  for words in (
    "<svg xmlns", "token budget of a step (tokens)", "inter-token gap of the decodes (ms)",
    "target 60 ms", "832 tokens: 57.9 ms", "1,536 by the rule: 106 ms",
  ):  # fmt: skip
    assert words in drawing


def test_a_budget_below_the_ridge_point_says_so(tmp_path):
  done = run("--itl_ms=12.5", "--out=", "--hardware=h100")
  assert done.returncode == 0, done.stderr
  assert "does not pay for its own weight stream" in done.stdout and "Wrote" not in done.stdout
  assert json.loads(done.stdout.splitlines()[-1])["binding"] == "weight_stream"


@pytest.mark.parametrize(
  "flags",
  [
    ("--itl_ms=14", "--page=1"),
    ("--itl_ms=300",),
    ("--model=smollm2-135m", "--itl_ms=20", "--decoders=1"),
  ],
)
def test_any_feasible_case_can_be_drawn(tmp_path, flags):
  done = run(*flags, "--out", tmp_path)
  assert done.returncode == 0, done.stderr
  assert "nan" not in (tmp_path / "itl.svg").read_text()


def test_an_impossible_target_names_the_lowest_that_can_be_met():
  done = run("--itl_ms=9", "--out=")
  assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == ""
  assert "itl_ms=9: no budget keeps it" in done.stderr and "takes 9.48 ms" in done.stderr
  lowest = re.search(r"raise itl_ms to ([0-9.]+) or more", done.stderr)[1]
  assert lowest == "10.6" and run(f"--itl_ms={lowest}", "--out=").returncode == 0


MISTAKES = {
  "model": (["--model=gpt5"], ["model='gpt5'", "llama3-8b"]),
  "hardware": (["--hardware=z80"], ["hardware='z80'", "h100"]),
  "decoders": (["--decoders=0"], ["decoders=0", "at least 1"]),
  "max_prefix": (["--max_prefix=0"], ["max_prefix=0", "at least 1"]),
  "page": (["--page=0"], ["page=0", "at least 1"]),
  "target": (["--itl_ms=0"], ["itl_ms=0", "positive"]),
  "not_a_number": (["--itl_ms=fast"], ["itl_ms", "fast"]),
  "stray": (["832"], ["832", "--flag"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_exit_with_2_and_one_clear_message(name):
  flags, words = MISTAKES[name]
  done = run(*flags, "--out=")
  assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
  assert all(word in done.stderr for word in words), done.stderr
  assert len(done.stderr.strip().splitlines()) == 1


def test_a_profile_takes_the_place_of_model_and_hardware(tmp_path):
  path = tmp_path / "profile.json"
  profiles.save(path, PROFILE)
  load = ("--decoders=8", "--context=100", "--max_prefix=500", "--page=16", "--out=")
  done = run("--profile", path, "--itl_ms=30", *load)
  assert done.returncode == 0, done.stderr
  document = json.loads(done.stdout.splitlines()[-1])
  assert document["model"] == "some" and document["budget_worst_chunk"] > 0
  assert document["at_worst_chunk"]["itl_ms"] <= 30 < document["at_next_page"]["itl_ms"]
  assert "by measured costs: a step 2 ms" in done.stdout and "overhead 4.4" in done.stdout
  path.write_text("{}")
  done = run("--profile", path, *load)
  assert done.returncode == 2 and "profile.json: format: must be" in done.stderr
