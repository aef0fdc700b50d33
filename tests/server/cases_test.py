"""Public bug reports of other servers: our answers. cases.md lists which test holds which."""

import json
import pathlib
import re

import pytest

from jaxserve.text.detokenizer import ByteDetokenizer
from tests.testing import servers
from tests.testing.servers import NAME

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TESTS = pathlib.Path(__file__).resolve().parents[1]
VECTORS = json.loads((TESTS / "golden" / "detok_vectors.json").read_text("utf-8"))


# All reports, by what they are about: text, requests, scheduling, HTTP, models, simulation.
CASES = (
  "A01 A02 A04 A05 A07 A08 A10 A11 B01 B02 B04 B05 B07 B08 B10 B11 B13 B14 B16 B17 B19 B20 B22 "
  "B23 B25 B26 B28 B29 B31 C01 C02 C04 C05 C07 C08 C10 C11 C13 C14 C16 C17 C19 C20 C22 C23 C25 "
  "C26 C28 C29 C31 C32 C34 C35 D01 D02 D04 D05 D07 D08 D10 D11 D13 D14 D16 D17 E01 E02 E04 E05 "
  "S01 S02 S04 S05 S07"
)


def test_the_vectors_are_all_there():
  assert {kind: len(vectors) for kind, vectors in VECTORS.items()} == {
    "vectors": 12, "truncated": 7, "invalid": 6,
  }  # fmt: skip


def test_every_case_is_held_by_a_test_that_exists():
  table = pathlib.Path(__file__).with_name("cases.md").read_text("utf-8")
  rows = re.findall(r"^\| ([A-Z]\d\d) \| .+? \| (.+) \|$", table, re.M)
  assert [case for case, _ in rows] == CASES.split()
  for case, held in rows:
    references = re.findall(r"`(\S+) :: (\w+)`", held)
    assert references or case == "B04", case  # the one that does not apply, with its reason
    for file, name in references:
      assert f"def {name}(" in (TESTS / file).read_text("utf-8"), (case, file, name)


@pytest.fixture(scope="module")
def run():
  with servers.running() as run:
    yield run
    servers.eventually(run.is_empty)


def _chat(message):
  return {"messages": [message] if isinstance(message, dict) else message}


BODIES = {
  "B10": (TEXT, [{"prompt": []}, {"prompt": [[]]}, {"prompt": ""}, {"prompt": [""]}]),
  "B14": (
    TEXT, [{"prompt": p} for p in ([-1], [259], [2**63], [1.5], ["1", 1], [True], [[1, 2], "a"])],
  ),
  "B16": (TEXT, [{"prompt": "a", "stop_token_ids": [99999999], "min_tokens": 1}]),
  "B17": (TEXT, [
    '{"prompt":"a","temperature":NaN}', '{"prompt":"a","temperature":Infinity}',
    '{"prompt":"a","temperature":-0.1}', '{"prompt":"a","temperature":2.1}',
    '{"prompt":"a","top_p":NaN}', '{"prompt":"a","presence_penalty":1e999}',
    '{"prompt":"a","repetition_penalty":0}', '{"prompt":"a","repetition_penalty":NaN}',
  ]),
  "B19": (TEXT, [{"prompt": "a", "top_p": -0.1}, {"prompt": "a", "top_p": 1.1}]),
  "B25": (CHAT, [
    '"this is not valid json{{{"', '["not","an","object"]', "42", "null", "{bad", "", "\ufeff{}"
  ]),
  "B26": (TEXT, [
    '{"prompt":"emoji \\ud83d"}', '{"prompt":"\\udcf0"}', '{"prompt":"a","stop":["\\ud83d"]}',
    b'{"prompt":"\xff"}',
  ]),
  "B29": (CHAT, [
    *(_chat({"role": "user", "content": c}) for c in ([{"type": "file"}], 5, {}, None)),
    {"messages": []}, {"messages": "hi"}, _chat({"role": "user"}),
  ]),
  "D02": (TEXT, [{"prompt": "a", "stream_options": {"include_usage": True}}]),
}  # fmt: skip


@pytest.mark.parametrize("case", BODIES)
def test_bad_bodies(run, case):
  path, bodies = BODIES[case]
  for body in bodies:
    content = json.dumps(body) if isinstance(body, dict) else body
    if isinstance(content, str):
      content = content.encode()
    reply = run.client.post(path, content=content)
    assert reply.status_code == 400 and reply.json()["error"]["message"], (body, reply.text)


def test_the_pair_of_surrogates_is_a_character(run):
  body = b'{"prompt":"\\ud83d\\ude00","max_tokens":1}'
  reply = run.client.post(TEXT, content=body)
  assert reply.status_code == 200 and reply.json()["usage"]["prompt_tokens"] == 4


class Spelled:
  """A tokenizer whose token i stands for these bytes."""

  def __init__(self, pieces):
    self.pieces = [bytes.fromhex(piece) for piece in pieces]

  def token_bytes(self, token):
    return self.pieces[token]

  def is_special(self, token):
    return False


def streamed(pieces):
  detokenizer = ByteDetokenizer(Spelled(pieces))
  return [detokenizer.push([i]) for i in range(len(pieces))], detokenizer.flush()


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["name"])
def test_real_tokenizations_stream_what_is_certain(vector):
  for one in vector["runs"]:
    assert streamed(one["token_bytes_hex"]) == (one["safe_deltas"], one["flush"]), one["tokenizer"]
    assert "".join(one["safe_deltas"]) + one["flush"] == one["text"] == vector["text"]


@pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda v: "-".join(v["token_bytes_hex"]))
def test_bytes_that_are_no_text_do_not_hold_a_stream(vector):
  """Bytes are sent as soon as it is certain that they are none, which may be sooner than there."""
  deltas, flush = streamed(vector["token_bytes_hex"])
  assert "".join(deltas) + flush == vector["text"]
  for end in range(len(deltas)):
    assert len("".join(deltas[: end + 1])) >= len("".join(vector["safe_deltas"][: end + 1]))


@pytest.mark.parametrize("vector", VECTORS["truncated"], ids=lambda v: v["bytes_hex"])
def test_a_text_cut_inside_a_character(vector):
  deltas, flush = streamed([vector["bytes_hex"]])
  assert deltas == [vector["complete_prefix"]]
  assert deltas[0] + flush == vector["replace_text"]
  assert bool(flush) == bool(vector["pending_bytes"])


def test_a_stop_inside_a_token_counts_the_token(run):
  """Tokens are bytes here, so the stop of two completes with its second, which counts."""
  tokens = run.complete("Hello", max_tokens=12, return_token_ids=True)["choices"][0]["token_ids"]
  text = run.complete("Hello", max_tokens=12)["choices"][0]["text"]
  stop = next(c for c in text if c.isascii() and c.isprintable())
  reply = run.complete("Hello", max_tokens=12, stop=stop, return_token_ids=True)
  (choice,) = reply["choices"]
  assert choice["token_ids"] == tokens[: tokens.index(ord(stop)) + 1]
  assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])
  assert stop not in choice["text"] and choice["finish_reason"] == "stop"


def test_each_choice_ends_for_its_own_reason(run):
  fields = {"n": 6, "temperature": 1, "seed": 3, "max_tokens": 12, "return_token_ids": True}
  plain = run.complete(**fields)["choices"]
  stop = plain[0]["token_ids"][4]
  reply = run.complete(**fields, stop_token_ids=[stop])
  assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop", "length"}
  counts = [len(choice["token_ids"]) for choice in reply["choices"]]
  assert reply["usage"]["completion_tokens"] == sum(counts) and max(counts) == 12 > min(counts)
  assert reply["usage"]["prompt_tokens"] == 5


def test_top_k_is_off_in_two_ways(run):
  ask = lambda k: run.complete(max_tokens=8, temperature=1, seed=4, top_k=k)["choices"]
  assert ask(-1) == ask(0) == ask(259) == ask(264)
  assert ask(1) == run.complete(max_tokens=8)["choices"]
  for bad in (-2, 1.5):
    assert run.post(TEXT, {"prompt": "a", "top_k": bad}).json()["error"]["param"] == "top_k"


def test_request_ids_of_clients_may_collide(run):
  import concurrent.futures

  body = {"model": NAME, "prompt": "Hello", "max_tokens": 30, "request_id": "same"}
  headers = {"x-request-id": "same"}
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    replies = list(pool.map(lambda _: run.post(TEXT, body, headers=headers), range(4)))
  assert all(reply.headers["x-request-id"] == "same" for reply in replies)
  assert len({reply.json()["id"] for reply in replies}) == 4
  big = run.get("/health", headers={"x-request-id": "x" * 50_000})
  assert big.status_code == 200 and len(big.headers["x-request-id"]) == 32


def test_a_bad_request_counts_as_one(run):
  before = {code: run.metric("http_responses_total", code=code) for code in ("400", "500")}
  run.client.post(TEXT, content="{")
  after = {code: run.metric("http_responses_total", code=code) for code in ("400", "500")}
  assert after == {"400": before["400"] + 1, "500": before["500"]}
  text = run.get("/metrics").text
  for line in re.findall(r"^# TYPE (\S+) counter", text, re.M):
    assert line.endswith("_total")


def test_connections_are_kept_longer_than_proxies_keep_them():
  from jaxserve.server import serving

  assert serving._KEEP_ALIVE_S > 60
