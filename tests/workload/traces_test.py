"""Readers, on small files of our own in the formats of the public traces."""

import datetime
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import workload

AZURE = (
  "TIMESTAMP,ContextTokens,GeneratedTokens\n"
  "2023-11-16 23:59:59.9999999,374,44\n"
  "2023-11-17 00:00:00.0000001,396,109\n"
  "2023-11-17 00:00:02,7,1\n"
)
MOONCAKE = (
  '{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
  '{"timestamp": 3000, "input_length": 12, "output_length": 3, "hash_ids": []}\n'
  '{"timestamp": 3250, "input_length": 13, "output_length": 4, "hash_ids": []}\n'
)
LOG = (
  '{"request_id": "b", "input_toks": 10, "output_toks": 6, "arrival_time": 1787267980.5}\n'
  '{"request_id": "a", "input_toks": 23, "output_toks": 5, "arrival_time": 1787267980.25}\n'
)
EXPECTED = {
  "azure": (AZURE, [0.0, 2e-7, 2.0000001], [374, 396, 7], [44, 109, 1]),
  "mooncake": (MOONCAKE, [0.0, 0.0, 0.25], [6758, 12, 13], [500, 3, 4]),
  "llmservingsim": (LOG, [0.0, 0.25], [23, 10], [5, 6]),
}
READERS = {
  "azure": workload.read_azure,
  "mooncake": workload.read_mooncake,
  "llmservingsim": workload.read_llmservingsim,
}


def write(path, text):
  path.write_bytes(text.encode("utf-8"))
  return path


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("form", ["plain", "dos", "bom", "blank lines", "no last newline"])
def test_formats(tmp_path, name, form):
  text, times, prompts, outputs = EXPECTED[name]
  text = {
    "plain": text, "dos": text.replace("\n", "\r\n"), "bom": "\ufeff" + text,
    "blank lines": text.replace("\n", "\n\n"), "no last newline": text.rstrip("\n"),
  }[form]  # fmt: skip
  path = write(tmp_path / "trace", text)
  for reader in (READERS[name], workload.read):
    load = reader(path)
    np.testing.assert_allclose(load.arrival_s, times, rtol=0, atol=1e-9)
    assert load.num_prompt.tolist() == prompts and load.num_output.tolist() == outputs


AZURE_LINE = "2023-11-16 18:15:46.6805900,1,1"
WRONG = {
  "header": ("azure", "TIMESTAMP,Context\n1,2\n", ":1: header='TIMESTAMP,Context': must be"),
  "date": ("azure", AZURE + "yesterday,1,1\n", ":5: TIMESTAMP='yesterday': must look like"),
  "fraction": ("azure", AZURE + "2023-11-16 18:15:46.x,1,1\n", ":5: TIMESTAMP="),
  "zero": ("azure", AZURE + AZURE_LINE[:-1] + "0\n", ":5: GeneratedTokens='0': must be a whole"),
  "text": ("azure", AZURE + AZURE_LINE[:-1] + "x\n", ":5: GeneratedTokens='x': must be a whole"),
  "short": ("azure", AZURE + AZURE_LINE[:-2] + "\n", ":5: GeneratedTokens is missing"),
  "huge": ("azure", AZURE + AZURE_LINE + "0" * 10 + "\n", ":5: GeneratedTokens='10000000000'"),
  "empty": ("azure", AZURE[:40], ":1: has no request"),
  "json": ("mooncake", MOONCAKE + "{oops\n", ":4: line='{oops': is not JSON"),
  "list": ("mooncake", MOONCAKE + "[1]\n", ":4: line='\\[1\\]': must be a JSON object"),
  "lacks": ("mooncake", '{"input_length": 3}\n', ":1: timestamp is missing"),
  "half": ("llmservingsim", LOG + LOG.replace("23", "2.5"), ":4: input_toks=2.5: must be a whole"),
  "nan": ("llmservingsim", LOG.replace("1787267980.25", "NaN"), ":2: arrival_time=nan: must be"),
  "bool": ("llmservingsim", LOG.replace("23", "true"), ":2: input_toks=True: must be a whole"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_file_line_field_and_value(tmp_path, name):
  reader, text, message = WRONG[name]
  path = write(tmp_path / "trace.txt", text)
  with pytest.raises(workload.TraceError, match="trace.txt" + message):
    READERS[reader](path)


def test_unknown_formats_are_listed(tmp_path):
  with pytest.raises(workload.TraceError, match="format='hello': is unknown; give an Azure CSV"):
    workload.read(write(tmp_path / "trace", "hello\n"))


ROWS = st.lists(
  st.tuples(st.integers(0, 10**12), st.integers(1, 10**6), st.integers(1, 10**6)),
  min_size=1, max_size=20,
)  # fmt: skip


@given(ROWS)
def test_what_is_written_is_read(tmp_path_factory, rows):
  """In any order; times in ten millionths of a second, which Azure's traces hold exactly."""
  begin = datetime.datetime(2023, 11, 16)
  lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
  for ticks, prompt, output in rows:
    second = begin + datetime.timedelta(seconds=ticks // 10**7)
    lines.append(f"{second}.{ticks % 10**7:07},{prompt},{output}")
  folder = tmp_path_factory.mktemp("traces")
  azure = workload.read(write(folder / "azure.csv", "\n".join(lines)))
  docs = [{"timestamp": t, "input_length": p, "output_length": o} for t, p, o in rows]
  mooncake = workload.read(write(folder / "m.jsonl", "\n".join(map(json.dumps, docs))))
  ordered = sorted(rows, key=lambda row: row[0])
  ticks = np.asarray([row[0] - ordered[0][0] for row in ordered])
  assert np.rint(azure.arrival_s * 1e7).astype(int).tolist() == ticks.tolist()
  assert np.rint(mooncake.arrival_s * 1e3).astype(int).tolist() == ticks.tolist()
  for load in (azure, mooncake):
    assert load.num_prompt.tolist() == [row[1] for row in ordered]
    assert load.num_output.tolist() == [row[2] for row in ordered]


def test_equal_hash_ids_of_mooncake_give_equal_text(tmp_path):
  text = "".join(
    json.dumps({"timestamp": i, "input_length": n, "output_length": 1, "hash_ids": ids}) + "\n"
    for i, (n, ids) in enumerate([(1100, [0, 1, 2]), (1030, [0, 1]), (900, [0, 5]), (700, [])])
  )
  load = workload.read(write(tmp_path / "trace", text))
  prompts = [load.prompt(i, 1009) for i in range(4)]
  assert [len(p) for p in prompts] == [1100, 1030, 900, 700]
  common = [
    int(np.argmin(np.append(prompts[0][:n] == p[:n], False)))
    for p, n in ((p, min(len(p), 1100)) for p in prompts[1:])
  ]
  assert common[0] // 512 == 2 and common[0] < 1030, "what no id covers is of its own"
  assert common[1] // 512 == 1 and common[2] < 512
  later = load.where(np.asarray([1, 2]))
  np.testing.assert_array_equal(later.prompt(0, 1009)[:512], prompts[0][:512])


@pytest.mark.parametrize("ids", [[0, 1, 2], [-1], ["a"], [1.5], 7])
def test_hash_ids_that_no_prompt_can_have_are_refused(tmp_path, ids):
  line = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": ids}
  with pytest.raises(workload.TraceError, match="hash_ids=.*at most 2"):
    workload.read(write(tmp_path / "trace", json.dumps(line)))
