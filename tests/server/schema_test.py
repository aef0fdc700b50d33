"""What the schema says of values is what the server takes, no more and no less."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from jaxserve import sched
from jaxserve.server import shapes
from tests.testing import servers

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {
  TEXT: ("CompletionRequest", {"prompt": "a", "max_tokens": 1}),
  CHAT: ("ChatRequest", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
}
# Right by themselves, refused in such a request: more texts than there are, or of another form.
BESIDE = {"best_of", "top_logprobs", "max_tokens"}
SCHEMATHESIS = shutil.which(os.environ.get("JAXSERVE_SCHEMATHESIS", "schemathesis"))


@pytest.fixture(scope="module")
def run():
  with servers.running(servers.with_tools()) as run:
    yield run
    servers.eventually(run.is_empty)
    assert run.metric("retraces") == 0
  servers.served().engine.set_params(sched.make_params(servers.SCHEDULER))


@pytest.fixture(scope="module")
def components(run):
  return run.get("/openapi.json").json()["components"]["schemas"]


@pytest.mark.parametrize("end", [1, 2, 9, 10, 11, 99, 100, 101, 259, 1000, 1023, 2048])
def test_numbers_below(end):
  pattern = re.compile(shapes.numbers_below(end))
  for number in range(3 * end + 20):
    assert bool(pattern.search(str(number))) is (number < end), (number, end)
  for text in ("", "00", "01", "-1", "1a", "a1", "1.0", " 1"):
    assert not pattern.search(text)


@pytest.mark.parametrize("path", BODIES)
def test_bounds_of_numbers_are_the_server_s(run, components, path):
  """At a bound a value is taken, beyond it the answer is a 400 that names the field."""
  name, body = BODIES[path]
  tried = 0
  for field, schema in components[name]["properties"].items():
    kind = next((k for k in schema.get("anyOf", [schema]) if k.get("type") in _NUMBERS), None)
    for bound, step in (("minimum", -1), ("maximum", 1)):
      if kind is None or bound not in kind:
        continue
      taken = run.post(path, body | {field: kind[bound], "n": kind[bound] if field == "n" else 1})
      error = taken.json().get("error", {})
      assert taken.status_code == 200 or field in BESIDE and error["code"] == "conflicting_fields"
      beyond = run.post(path, body | {field: kind[bound] + step})
      assert beyond.status_code == 400 and beyond.json()["error"]["param"] == field
      tried += 1
  assert tried >= 18


_NUMBERS = ("integer", "number")


def test_lists_and_texts_have_the_bounds_of_the_schema(run, components):
  fields = components["CompletionRequest"]["properties"]
  room = next(k["maxItems"] for k in fields["prompt"]["anyOf"] if "maxItems" in k)
  assert room == servers.NUM_SEATS + 256  # seats, and places in the queue
  texts = ["a"] * room
  assert len(run.complete(texts, max_tokens=1)["choices"]) == room
  for field, value in {
    "prompt": [*texts, "a"],
    "stop": ["a"] * (shapes.MAX_STOPS + 1),
    "bad_words": ["a"] * (shapes.MAX_BAD_WORDS + 1),
    "logit_bias": {"007": 1},
    "min_tokens": 1.5,
  }.items():
    reply = run.post(TEXT, {"prompt": "a", "max_tokens": 1, field: value})
    param = "n" if field == "prompt" else field
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, field
  run.complete("a", max_tokens=1, stop=["x" * 1024] * 32, min_tokens=10**12, top_k=10**30)


CONFLICTS = {
  "best_of": {"best_of": 2},
  "max_tokens": {"max_tokens": 0},
  "stream_options": {"stream_options": {}},
  "prompt_logprobs": {"prompt_logprobs": 1, "stream": True},
  "n": {"prompt": ["a"] * 100, "n": 100},
  "allowed_token_ids": {"allowed_token_ids": [258], "min_tokens": 1},
}


@pytest.mark.parametrize("param", CONFLICTS)
def test_what_no_schema_says_has_a_code_of_its_own(run, param):
  reply = run.post(TEXT, {"prompt": "a", "max_tokens": 1} | CONFLICTS[param])
  error = reply.json()["error"]
  assert (reply.status_code, error["code"], error["param"]) == (400, "conflicting_fields", param)


def test_other_reasons_that_no_schema_says(run):
  long = {"prompt": "a" * servers.MAX_MODEL_LEN}
  bad = {"messages": [{"role": "nobody", "content": "a"}]}
  for path, body, code in (
    (TEXT, long, "context_length_exceeded"),
    (TEXT, {"prompt": "a", "guided_regex": "["}, "invalid_structure"),
    (CHAT, bad, "template_error"),
  ):
    if code == "invalid_structure":
      pytest.importorskip("llguidance")
    reply = run.post(path, body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)


@pytest.mark.skipif(SCHEMATHESIS is None, reason="not installed: schemathesis")
def test_schemathesis_finds_nothing(run, tmp_path):
  """Every check it has; positive_data_acceptance in the form of `schemathesis_hooks`."""
  pytest.importorskip("llguidance")
  log = tmp_path / "log"
  hooks = pathlib.Path(__file__).resolve().parents[1] / "testing"
  environ = {
    **os.environ, "JAXSERVE_SCHEMATHESIS_LOG": str(log), "PYTHONPATH": str(hooks),
    "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
  }  # fmt: skip
  done = subprocess.run(
    [
      SCHEMATHESIS, "run", f"{run.url}/openapi.json", "--checks=all",
      "--exclude-checks=positive_data_acceptance", "-n", "20", "--seed", "1",
      "--suppress-health-check=all", "--continue-on-failure",
    ],
    env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout[-8000:]
  answers = [line.split() for line in log.read_text("utf-8").splitlines()]
  for path in (TEXT, CHAT, "/tokenize", "/detokenize", "/live/settings"):
    statuses = [status for where, status, _ in answers if where == path]
    assert statuses.count("200") > len(statuses) / 2 > 5, path
  health = json.loads(run.get("/health").text)
  assert health["status"] == "ok"
