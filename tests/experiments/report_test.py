"""Charts, tables and the page around them."""

import html.parser

import pytest

from experiments import report

LINES = [
  report.Line(label="a < b", x=[1, 10, 100], y=[2.0, 20.0, 9.0], texts=["one", "two", "three"]),
  report.Line(label="points", x=[2, 20], y=[3.0, 4.0], joined=False, steps=True),
]
CHARTS = [
  report.Chart(
    name="curves", title="Curves", x_label="tokens", y_label="time (ms)", content=LINES,
    log_x=True, log_y=True, levels=[(5.0, "objective & more")], verticals=[(3.0, "here")],
    ticks=[1, 10, 100], caption="What they show.",
  ),
  report.Chart(
    name="bars", title="Bars", x_label="policy", y_label="requests/s", y_from=0,
    content=report.Bars(groups=["x", "y"], series={"one": [1.0, 2.0], "two": [None, 0.5]}),
  ),
]  # fmt: skip
PAGE = report.Page(
  title="A title", question="Why?", setup="On a <machine>", findings=["it is 3 & 4"],
  columns=(("", "name", "{}"), ("ms", "ms", "{:,.1f}"), ("absent", "none", "{}")),
  rows=[{"name": "first", "ms": 1234.56}, {"name": "second", "ms": None}], charts=CHARTS,
)  # fmt: skip


class Reader(html.parser.HTMLParser):
  """Fails on a tag that closes what is not open; collects what would be loaded from outside."""

  VOID = frozenset({"meta", "link", "img", "br", "hr"})

  def __init__(self, text):
    super().__init__()
    self.open, self.seen, self.outside, self.words = [], [], [], []
    self.feed(text)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.seen.append(tag)
    if tag not in self.VOID:
      self.open.append(tag)
    for name, value in attrs:
      if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
        self.outside.append(value)

  def handle_startendtag(self, tag, attrs):
    self.handle_starttag(tag, attrs)
    if tag not in self.VOID:
      self.open.pop()

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.words.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  folder = tmp_path_factory.mktemp("report")
  return folder, report.write(folder, PAGE, {"commit": "abc"})


def test_the_page_is_whole_and_stands_alone(written):
  folder, paths = written
  assert sorted(path.name for path in paths) == [
    "bars.png", "bars.svg", "curves.png", "curves.svg", "report.html",
  ]  # fmt: skip
  reader = Reader((folder / "report.html").read_text("utf-8"))
  assert reader.seen.count("svg") == 2 and not reader.outside
  text = "".join(reader.words)
  for words in ("A title", "On a <machine>", "it is 3 & 4", "1,234.6", "What they show.", "abc"):
    assert words in text
  assert "absent" not in text


def test_drawings_name_axes_series_and_lines(written):
  folder, _ = written
  assert (folder / "bars.png").read_bytes().startswith(b"\x89PNG")
  curves = (folder / "curves.svg").read_text()
  for words in ("time (ms)", "tokens", "a &lt; b", "objective &amp; more", "here", "three"):
    assert words in curves
  assert "requests/s" in (folder / "bars.svg").read_text()


def test_the_same_chart_is_the_same_file(written):
  folder, _ = written
  assert report.draw(CHARTS[0])[1] == (folder / "curves.svg").read_text()


def test_colours_markers_and_dashes_tell_series_apart():
  assert len(set(report.COLOURS)) == len(report.MARKERS) == len(report.HATCHES) == 8


def test_a_table_for_the_terminal():
  assert report.text_table(PAGE.rows, PAGE.columns).splitlines() == [
    "             ms", " first  1,234.6", "second        -",
  ]  # fmt: skip
