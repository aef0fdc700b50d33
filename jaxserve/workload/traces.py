"""Readers of recorded traces. Each gives a `Workload` whose first request arrives at 0 s."""

import csv
import datetime
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxserve.workload.record import Workload

Path = str | pathlib.Path

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST_TOKENS = 2**31 - 1
_BLOCK_TOKENS = 512  # of Mooncake's hash_ids


class TraceError(ValueError):
  """A trace cannot be read; the message names file, line, field, value and remedy."""


def read(path: Path) -> Workload:
  """Reads a trace of any of the known formats, told by its first line.

  Raises:
    TraceError: no such format, or a line is wrong.
    OSError: the file cannot be opened.
  """
  with open(path, encoding="utf-8-sig") as file:
    first = file.readline().strip()
  for mark, reader in (
    (_AZURE_COLUMNS[0], read_azure),
    ('"input_length"', read_mooncake),
    ('"input_toks"', read_llmservingsim),
  ):
    if mark in first:
      return reader(path)
  raise TraceError(
    f"{path}:1: format={first[:40]!r}: is unknown; give an Azure CSV with the header "
    f"{','.join(_AZURE_COLUMNS)}, or JSON lines of Mooncake (input_length) or LLMServingSim "
    "(input_toks)"
  )


def read_azure(path: Path) -> Workload:
  """The Azure LLM inference traces: CSV `TIMESTAMP,ContextTokens,GeneratedTokens`.

  Timestamps carry 7 digits of a second. Source: Azure Public Dataset, "Splitwise" (ISCA 2024).

  Raises:
    TraceError: see there.
  """
  rows = []
  with open(path, encoding="utf-8-sig", newline="") as file:
    reader = csv.reader(file)
    header = tuple(next(reader, ()))
    if header != _AZURE_COLUMNS:
      raise TraceError(
        f"{path}:1: header={','.join(header)!r}: must be {','.join(_AZURE_COLUMNS)}"
      )  # fmt: skip
    for row in filter(None, reader):
      line = _Line(path, reader.line_num, dict(zip(header, row, strict=False)))
      rows.append((line.ticks("TIMESTAMP"), *map(line.tokens, _AZURE_COLUMNS[1:])))
  return _workload(path, rows, 10**7)


def read_mooncake(path: Path) -> Workload:
  """Mooncake's traces: JSON lines with timestamp (milliseconds), input_length, output_length.

  hash_ids, one for every 512 tokens of the prompt, become `Workload.blocks`. Source: Mooncake
  (FAST 2025).

  Raises:
    TraceError: see there.
  """
  return _read_jsonl(path, "timestamp", 1000, "input_length", "output_length", "hash_ids")


def read_llmservingsim(path: Path) -> Workload:
  """Request logs of LLMServingSim: JSON lines with arrival_time (seconds), input_toks, output_toks.

  Other fields are ignored. Source: LLMServingSim 2.0, its recorded vLLM runs.

  Raises:
    TraceError: see there.
  """
  return _read_jsonl(path, "arrival_time", 1, "input_toks", "output_toks")


def _read_jsonl(
  path: Path, time: str, per_second: float, prompt: str, output: str, blocks: str = ""
) -> Workload:
  lines = _json_lines(path)
  rows = [
    (line.number(time), line.tokens(prompt), line.tokens(output), line.blocks(blocks, prompt))
    for line in lines
  ]
  return _workload(path, rows, per_second)


class _Line:
  """One line of a file, and the errors about it."""

  def __init__(self, path: Path, line: int, fields: dict[str, Any]):
    self._path, self._line, self._fields = path, line, fields

  def error(self, field: str, remedy: str) -> TraceError:
    value = self._fields.get(field)
    return TraceError(f"{self._path}:{self._line}: {field}={value!r}: {remedy}")

  def _parse(self, field: str, parse: Callable[[Any], Any], remedy: str) -> Any:
    if field not in self._fields:
      raise TraceError(f"{self._path}:{self._line}: {field} is missing; {remedy}")
    try:
      return parse(self._fields[field])
    except (ValueError, TypeError, OverflowError):
      raise self.error(field, remedy) from None

  def tokens(self, field: str) -> int:
    remedy = f"must be a whole number of tokens in [1, {_MOST_TOKENS}]; drop or fix the line"
    tokens = self._parse(field, _whole, remedy)
    if not 1 <= tokens <= _MOST_TOKENS:
      raise self.error(field, remedy)
    return tokens

  def blocks(self, field: str, prompt: str) -> tuple[int, ...]:
    """Ids of the prompt's blocks; () if there are none."""
    ids, most = self._fields.get(field) or [], -(-self.tokens(prompt) // _BLOCK_TOKENS)
    fine = isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**48 for i in ids)
    if not fine or len(ids) > most:
      remedy = f"must be a list of at most {most} whole numbers in [0, 2^48); drop or fix the line"
      raise self.error(field, remedy)
    return tuple(ids)

  def number(self, field: str) -> float:
    remedy = "must be a finite number; drop or fix the line"
    number = self._parse(field, float, remedy)
    if not np.isfinite(number):
      raise self.error(field, remedy)
    return number

  def ticks(self, field: str) -> int:
    """Ten millionths of a second of a date and time, exact."""
    return self._parse(field, _ticks, "must look like 2023-11-16 18:15:46.6805900")


def _whole(value: Any) -> int:
  if isinstance(value, bool) or not isinstance(value, int | str):
    raise ValueError(value)
  return int(value)


def _ticks(value: str) -> int:
  whole, _, fraction = value.strip().partition(".")
  if len(whole) < len("2023-11-16 18:15:46") or not (fraction or "0").isdecimal():
    raise ValueError(value)
  return _second(whole) * 10**7 + int(f"{fraction:0<7}"[:7])


@functools.lru_cache(maxsize=64)
def _second(text: str) -> int:
  moment = datetime.datetime.fromisoformat(text)
  since = moment.replace(tzinfo=datetime.UTC)
  return (since - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // (
    datetime.timedelta(seconds=1)
  )


def _json_lines(path: Path) -> Iterator[_Line]:
  text = pathlib.Path(path).read_text("utf-8-sig")
  for number, line in enumerate(text.split("\n"), 1):
    if not line.strip():
      continue
    try:
      fields = json.loads(line)
    except json.JSONDecodeError as error:
      raise TraceError(f"{path}:{number}: line={line[:40]!r}: is not JSON ({error.msg})") from None
    if not isinstance(fields, dict):
      raise TraceError(f"{path}:{number}: line={line[:40]!r}: must be a JSON object")
    yield _Line(path, number, fields)


def _workload(path: Path, rows: Iterable[tuple], per_second: float) -> Workload:
  """Rows of (time, prompt, output), sorted by time; equal times keep the order of the file."""
  rows = sorted(rows, key=lambda row: row[0])
  if not rows:
    raise TraceError(f"{path}:1: has no request; give a trace with at least one")
  times, prompts, outputs, *blocks = zip(*rows, strict=True)
  known = bool(blocks) and any(blocks[0])
  return Workload(
    arrival_s=np.asarray([time - times[0] for time in times], np.float64) / per_second,
    num_prompt=np.asarray(prompts, np.int32),
    num_output=np.asarray(outputs, np.int32),
    blocks=blocks[0] if known else (),
    block_size=_BLOCK_TOKENS,
  )
