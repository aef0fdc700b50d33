"""The comparison with other engines, on fake ones; nothing is installed and nothing downloaded."""

import ast
import dataclasses
import json
import pathlib
import sys

import numpy as np
import pytest

from experiments.peers import config, figures, install, kept, measure, models, plot, run, table
from experiments.peers import worker as workers
from experiments.peers.config import CASES, US, Case, Peer
from jaxserve.config import ModelConfig
from jaxserve.model.hf_directory import read_hf_directory
from tests.testing import fake_peer

FAKE = fake_peer.__file__
TINY = ModelConfig(
  vocab_size=997, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6,
  num_kv_heads=3, head_dim=4,
)  # fmt: skip
SOME = ("decode_1", "stall_512", "prefill_512")


def fake(name, trouble="", **fields):
  return Peer(name=name, title=name, worker=FAKE, environment=(("FAKE", trouble),), **fields)


def started(tmp_path, trouble="", timeout_s=20.0):
  peer = fake("some", trouble)
  return workers.start(peer, None, tmp_path / "log", tmp_path / "cache", timeout_s)


@pytest.fixture
def world(tmp_path, monkeypatch):
  """`run.run` on fakes: a function of what goes wrong with whom, and of fields of the config."""
  env = tmp_path / "env"
  (env / "bin").mkdir(parents=True)
  (env / "bin" / "python").symlink_to(sys.executable)
  monkeypatch.setattr(models, "L512", TINY)
  monkeypatch.setattr(measure, "OURS", fake(US))
  counts = {"started": 0}
  start = workers.start

  def counted(*args):
    counts["started"] += 1
    return start(*args)

  monkeypatch.setattr(workers, "start", counted)

  def go(trouble=(), retry=False, **fields):
    known = {name: fake(name, dict(trouble).get(name, "")) for name in ("vllm", "hf")}
    for module in (config, measure, run, plot, table):
      monkeypatch.setattr(module, "PEERS", known)
    fields = {"peers": ("vllm", "hf"), "cases": SOME, "rounds": 1, "timeout_s": 5.0} | fields
    fields.setdefault("venvs", tuple((name, str(env)) for name in fields["peers"]))
    chosen = config.Config(
      models=("l512",), settle_s=0.0, peers_dir=str(tmp_path / "peers"), **fields
    )
    counts["started"] = 0
    result = run.run(chosen, tmp_path / "out", tmp_path, retry)
    return result, counts["started"], chosen

  return go


def lines(tmp_path):
  return [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").open()]


def test_a_worker_answers_and_a_late_request_waits_for_outputs(tmp_path):
  process = started(tmp_path)
  try:
    assert process.ask("load", model="m", options={"x": 1})["x"] == 1
    first = {"prompt": [5, 6], "tokens": 6, "after": 0}
    late = {"prompt": [7], "tokens": 1, "after": 4}
    one, other = process.ask("serve", chunk=8, requests=[first, late])["requests"]
  finally:
    process.close()
  assert one["tokens"] == [12, 13, 14, 15, 16, 17] and other["tokens"] == [8]
  assert one["times_s"] == sorted(one["times_s"]) and len(one["times_s"]) == 6
  assert one["times_s"][3] <= other["submitted_s"] < one["times_s"][4] == other["times_s"][0]
  assert "noise that is no answer" in (tmp_path / "log").read_text()
  assert not process.alive


@pytest.mark.parametrize("trouble, words", [
  ("no_load", "MemoryError: no room"), ("no_serve", "ValueError: cannot serve"),
  ("dies", "ended at serve: .*last words"), ("hangs", "no answer to serve in 0.5 s"),
])  # fmt: skip
def test_what_goes_wrong_in_a_worker_is_told(tmp_path, trouble, words):
  process = started(tmp_path, trouble, timeout_s=0.5)
  with pytest.raises(workers.WorkerError, match=f"(?s){words}"):
    process.ask("load", model="m")
    process.ask("serve", requests=[{"prompt": [1], "tokens": 1}])
  process.close(at_once=True)
  assert not process.alive


def test_an_unknown_message_is_an_error_and_the_worker_lives(tmp_path):
  process = started(tmp_path)
  with pytest.raises(workers.WorkerError, match="op='dance'"):
    process.ask("dance")
  assert process.ask("load", model="m")["model"] == "m"
  process.close()


def test_figures_of_a_decode_count_what_all_rows_do():
  steps = np.arange(1, 11) / 10
  rows = [{"times_s": steps.tolist()}, {"times_s": (steps + 0.05).tolist()}]
  found = figures.figures(Case(kind="decode", rows=2), rows)
  # From 0.45 s, the fourth output of the later row, to 1.0 s, the last of the earlier one.
  assert found["tokens_per_s"] == pytest.approx(11 / 0.55)


def test_rows_that_never_decode_together_give_no_rate():
  rows = [{"times_s": [1, 2, 3, 4, 5]}, {"times_s": [6, 7, 8, 9, 10]}]
  with pytest.raises(ValueError, match="a row ended before"):
    figures.figures(Case(kind="decode", rows=2), rows)


def test_figures_of_a_stall_are_the_gaps_after_the_arrival():
  times = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.6, 1.8]
  rows = [{"times_s": times, "submitted_s": 0}, {"times_s": [1.7], "submitted_s": 0.65}]
  found = figures.figures(Case(kind="stall", rows=1, prompt=9), rows)
  assert found["stall_ms"] == pytest.approx(1000)
  assert found["base_gap_ms"] == pytest.approx(100)
  assert found["ttft_s"] == pytest.approx(1.05)


def test_everybody_is_sent_the_same_and_rounds_differ():
  chosen = config.Config()
  send = lambda seed: figures.requests(CASES["stall_512"], chosen, 40, 1000, seed)
  assert send(1) == send(1) != send(2)
  lengths = [(len(r["prompt"]), r["tokens"], r["after"]) for r in send(1)]
  assert lengths == [(128, 40, 0)] * 7 + [(4096, 1, 10)]
  assert all(3 <= token < 1000 for request in send(1) for token in request["prompt"])


def test_agreement_counts_first_tokens():
  assert figures.agreement([[1, 2, 3], [4, 5]], [[1, 2, 9], [4, 5]]) == [2, 2]


def test_bytes_of_a_decode_leave_out_an_embedding_that_is_only_looked_up():
  tied = dataclasses.replace(TINY, tie_word_embeddings=True)
  untied_step, tied_step = (figures.decode_bytes(one, 3, 10, 8) for one in (TINY, tied))
  assert untied_step == tied_step == 2 * tied.num_params + 240


def test_our_engine_is_in_the_middle_of_every_round():
  peers = ["a", "b", "c", "d"]
  orders = [measure.order(peers, number) for number in range(8)]
  assert all(order[2] == US and sorted(order) == [*peers, US] for order in orders)
  assert len({order[0] for order in orders}) == 4 and len({order[-1] for order in orders}) == 4
  assert measure.order([], 3) == [US]


def test_rounds_that_are_kept_are_not_measured_again(world, tmp_path):
  result, processes, _ = world()
  assert processes == 3
  assert [line["case"] for line in lines(tmp_path)] == ["agreement", *SOME, "memory"]
  again, processes, _ = world()
  assert processes == 0 and again.rows == result.rows
  more, processes, _ = world(rounds=2)
  assert processes == 3
  assert [(line["case"], line["round"]) for line in lines(tmp_path)[5:]] == [
    (case, 1) for case in SOME
  ]
  fewer, processes, _ = world(peers=("hf",), rounds=2)
  assert processes == 0 and len(fewer.rows) == len(more.rows)


def test_a_change_of_what_is_measured_measures_again(world, tmp_path):
  world()
  _, processes, _ = world(context=64)
  assert processes == 3 and len(lines(tmp_path)) == 10


def test_rows_say_where_they_come_from(world, tmp_path):
  result, _, chosen = world()
  (first, *_) = lines(tmp_path)
  assert first["versions"] == {US: {"fake": "1"}, "vllm": {"fake": "1"}, "hf": {"fake": "1"}}
  assert {"commit", "date", "load_average", "jax"} <= first.keys()
  made = run.origin(result.rows)
  assert made["versions"] == {"fake": "1"} and len(made["load_average"]) == 2
  shown = plot.page(chosen, result.summary, result.findings)
  assert {line["case"] for line in shown.rows} == {*SOME, "memory"}
  assert "of_limit" in next(line for line in shown.rows if line["case"] == "prefill_512")
  agreed = [words for words in result.findings if "first tokens" in words]
  assert agreed == [
    "l512, first tokens equal to jaxserve's, of 24 a prompt: vllm 24 24 24 24; hf 24 24 24 24"
  ]


def test_a_peer_that_cannot_be_installed_is_left_out_by_name(world, tmp_path):
  result, processes, _ = world(venvs=(("vllm", "/nowhere"), ("hf", str(tmp_path / "env"))))
  assert processes == 2
  assert any(words.startswith("left out: vllm, /nowhere") for words in result.findings)
  assert all("vllm" not in row["values"] for row in result.rows)


@pytest.mark.parametrize("trouble, words", [
  ("no_load", "MemoryError: no room"), ("dies", "last words"), ("no_serve", "cannot serve"),
])  # fmt: skip
def test_a_peer_that_fails_is_left_out_by_name_and_the_others_go_on(world, trouble, words):
  result, _, _ = world(trouble={"vllm": trouble})
  (finding,) = [said for said in result.findings if said.startswith("left out")]
  assert "vllm on l512" in finding and words in finding
  assert {line["best"] for line in result.summary} == {"hf"}
  again, processes, _ = world(trouble={"vllm": trouble})
  assert processes == 0 and again.findings == result.findings
  assert world(retry=True)[1] == 3


def test_what_failed_is_tried_again_when_asked_to(tmp_path):
  values = {US: {"a": 1}, "hf": {"error": "no"}}
  kept.Kept(tmp_path, []).add("m", "decode_1", 0, values, {}, {"vllm": "no room"})
  plain, again = kept.Kept(tmp_path, []), kept.Kept(tmp_path, [], retry=True)
  for engines, found, found_again in (
    ([US], True, True), ([US, "hf"], True, False), ([US, "vllm"], True, False),
    ([US, "llamacpp"], False, False),
  ):  # fmt: skip
    assert (plain.find("m", "decode_1", 0, engines) is not None) == found
    assert (again.find("m", "decode_1", 0, engines) is not None) == found_again
  assert plain.find("m", "decode_1", 1, [US]) is None
  assert kept.Kept(tmp_path, ["another"]).find("m", "decode_1", 0, [US]) is None


def test_without_peers_there_are_figures_and_no_ratios(world):
  result, _, chosen = world(peers=())
  assert all(line[US] > 0 and "ratio" not in line for line in result.summary)
  assert plot.page(chosen, result.summary, result.findings).charts == []


def rounds(case, *values):
  return [{"model": "m", "case": case, "round": i, "values": v} for i, v in enumerate(values)]


def test_ratios_are_taken_round_by_round_and_bars_are_judged():
  speed = lambda value: {"tokens_per_s": value}
  rows = rounds(
    "decode_8",
    {US: speed(80), "hf": speed(100), "vllm": speed(10)},
    {US: speed(30), "hf": speed(60), "vllm": speed(10)},
    {US: speed(90), "hf": speed(100), "vllm": {"error": "no"}},
  )
  (line,) = table.summarize(rows)
  assert line["best"] == "hf" and line[US] == 80 and line["hf"] == 100
  assert line["ratios"] == {"hf": [0.5, 0.8, 0.9], "vllm": [3, 5.5, 8]}
  assert (line["ratio_min"], line["ratio"], line["ratio_max"]) == (0.5, 0.8, 0.9)
  assert line["bar"] == ">= 0.8" and line["met"] == "yes"


def test_of_times_the_least_is_the_best_and_bars_are_most():
  of = lambda stall: {"stall_ms": stall, "ttft_s": 1.0, "base_gap_ms": 1.0}
  rows = rounds("stall_512", {US: of(130), "hf": of(100), "vllm": of(200)})
  line = table.summarize(rows)[0]
  assert line["best"] == "hf" and line["ratio"] == 1.3 and line["met"] == "no"
  assert "stall_512 stall_ms 1.30 (<= 1.25, hf)" in table.findings([line], rows, {})[0]


def test_a_chart_turns_times_over():
  rows = rounds("memory", {US: {"peak_mb": 50}, "hf": {"peak_mb": 100}})
  chart = plot.chart("m", table.summarize(rows))
  assert list(chart.content.series.values()) == [[2.0]]


@pytest.mark.parametrize("fields, words", [
  ({"peers": ("tgi",)}, "peers='tgi'"), ({"cases": ("decode_3",)}, "cases='decode_3'"),
  ({"models": ("gpt",)}, "models='gpt'"), ({"cases": ()}, "at least one"),
  ({"venvs": (("tgi", "x"),)}, "venvs='tgi'"),
])  # fmt: skip
def test_a_mistake_is_named(fields, words):
  with pytest.raises(ValueError, match=words):
    config.Config(**fields)


def test_an_environment_is_given_as_a_pair():
  assert config.pair("hf=/a/b") == ("hf", "/a/b")
  with pytest.raises(ValueError, match="PEER=FOLDER"):
    config.pair("hf")


def test_an_environment_is_made_once(tmp_path, monkeypatch):
  ran = []
  monkeypatch.setattr(install, "_run", lambda command, folder: ran.append(command))
  peer = fake("some", requires=("a==1",), unwanted=("b",))
  folder = install.prepare(peer, tmp_path)
  assert folder == install.prepare(peer, tmp_path) and len(ran) == 3
  assert "a==1" in ran[1] and "b" in ran[2]
  install.prepare(dataclasses.replace(peer, requires=("a==2",)), tmp_path)
  assert len(ran) == 6 and "a==2" in ran[4]


def test_an_installation_that_fails_leaves_nothing_and_says_why(tmp_path):
  code = "import sys; sys.exit('no such package')"
  with pytest.raises(install.Unavailable, match="no such package"):
    install._run([sys.executable, "-c", code], _made(tmp_path / "env"))
  assert not (tmp_path / "env").exists()


def _made(folder):
  folder.mkdir()
  return folder


@pytest.mark.parametrize("tied", [True, False])
def test_all_formats_hold_the_same_weights(tmp_path, monkeypatch, tied):
  monkeypatch.setattr(models, "L512", dataclasses.replace(TINY, tie_word_embeddings=tied))
  hf = models.prepare("l512", tmp_path, tmp_path)
  assert models.prepare("l512", tmp_path, tmp_path) == hf
  ours = read_hf_directory(hf, "float32")
  assert ours.config == dataclasses.replace(TINY, tie_word_embeddings=tied)
  tensors = _gguf_tensors(models.convert("gguf", hf, None) / "model.gguf")
  for name, heads in (("attn_q", TINY.num_heads), ("attn_k", TINY.num_kv_heads)):
    rows = heads * TINY.head_dim
    begin = 0 if name == "attn_q" else TINY.num_heads * TINY.head_dim
    expected = ours.params["layers.1.qkv"][begin : begin + rows]
    # Pairs (2 i, 2 i + 1) of a head there are (i, i + D / 2) here.
    got = tensors[f"blk.1.{name}.weight"].reshape(heads, TINY.head_dim // 2, 2, -1)
    np.testing.assert_array_equal(got.swapaxes(1, 2).reshape(rows, -1), expected)
  np.testing.assert_array_equal(tensors["blk.0.ffn_down.weight"], ours.params["layers.0.down"])
  np.testing.assert_array_equal(tensors["token_embd.weight"], ours.params["embed"])


def _gguf_tensors(path):
  import gguf

  reader = gguf.GGUFReader(path)
  return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}


def test_workers_of_peers_import_nothing_of_ours():
  folder = pathlib.Path(workers.__file__).with_name("adapters")
  files = [path for path in folder.glob("*.py") if path.name != "jaxserve_peer.py"]
  assert len(files) >= 5
  for path in files:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        names |= {alias.name.split(".")[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        names.add(node.module.split(".")[0])
    assert not names & {"jaxserve", "experiments"}, path
