"""Progress: a few log lines where there is no terminal, a bar where there is one."""

import sys

from absl import logging

from jaxserve.progress import progress


def lines(monkeypatch, total, unit, steps):
  monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
  seen = []
  monkeypatch.setattr(logging, "info", lambda text, *args: seen.append(text % args))
  with progress(total, unit, "Working") as bar:
    for count, note in steps:
      bar.advance(count, note)
  return seen


def test_logs_at_every_quarter_only(monkeypatch):
  seen = lines(monkeypatch, 100, "items", [(1, "")] * 100)
  assert seen == [f"Working: {n}%, {n} of 100 items" for n in (25, 50, 75, 100)]


def test_a_step_over_several_quarters_is_one_line_with_its_note(monkeypatch):
  assert lines(monkeypatch, 4, "buckets", [(3, "T=64")]) == ["Working: 75%, 3 of 4 buckets (T=64)"]


def test_bytes_are_shown_as_megabytes(monkeypatch):
  assert lines(monkeypatch, 2_000_000, "B", [(2_000_000, "")]) == ["Working: 100%, 2 of 2 MB"]


def test_nothing_to_do_is_no_error(monkeypatch):
  assert lines(monkeypatch, 0, "items", []) == []


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
  monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
  with progress(2, "buckets", "Compiling") as bar:
    bar.advance(2, note="T=64")
  shown = capsys.readouterr().err
  assert "Compiling" in shown and "2/2" in shown and "T=64" in shown
