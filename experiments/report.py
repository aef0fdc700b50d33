"""Charts as data, drawn as PNG and SVG, and one self-contained page for each experiment.

matplotlib draws them (the extra `plot`) and is imported only here, when a chart is drawn.
Colours are those of Okabe and Ito; series also differ by marker and dashes, so that none is told by
colour alone.
"""

import dataclasses
import html
import io
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#5c6370", "#000000")
# Dots or circles as hatches make an SVG ten times larger.
MARKERS, DASHES = "osD^vPX*", ("-", "--", "-.", ":", "-", "--", "-.", ":")
HATCHES = ("", "///", "xx", "\\\\\\", "--", "++", "||", "////")

Column = tuple[str, str, str]
"""Title, key of the row, format of the value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
  """A curve, or points if not `joined`. `texts` are written beside its points."""

  label: str
  x: Sequence[float]
  y: Sequence[float]
  texts: Sequence[str] = ()
  joined: bool = True
  markers: bool = True
  steps: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bars:
  """Groups of bars: one value a group for each series."""

  groups: Sequence[str]
  series: Mapping[str, Sequence[float | None]]
  format: str = "{:.3g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
  """One drawing.

  `name` is the stem of its files; axis labels carry units; `levels` and `verticals` are lines
  across, with what they say; `ticks` replaces the numbers of a logarithmic x axis.
  """

  name: str
  title: str
  x_label: str
  y_label: str
  content: Sequence[Line] | Bars
  caption: str = ""
  log_x: bool = False
  log_y: bool = False
  levels: Sequence[tuple[float, str]] = ()
  verticals: Sequence[tuple[float, str]] = ()
  ticks: Sequence[float] = ()
  y_from: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
  """What one experiment has to say."""

  title: str
  question: str
  setup: str
  findings: Sequence[str]
  columns: Sequence[Column]
  rows: Sequence[Mapping[str, Any]]
  charts: Sequence[Chart]


def cells(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[list[str]]:
  """Titles, then a line a row; columns that no row has are left out."""
  columns = [column for column in columns if any(column[1] in row for row in rows)]
  lines = [[title for title, _, _ in columns]]
  for row in rows:
    lines.append([
      "-" if row.get(key) is None else form.format(row[key]) for _, key, form in columns
    ])  # fmt: skip
  return lines


def text_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
  """Right-aligned columns for a terminal."""
  lines = cells(rows, columns)
  widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
  return "\n".join(
    "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
    for line in lines
  )  # fmt: skip


def write(folder: pathlib.Path, page: Page, provenance: Mapping[str, Any]) -> list[pathlib.Path]:
  """Draws every chart as NAME.png and NAME.svg and writes report.html, which holds them all."""
  folder.mkdir(parents=True, exist_ok=True)
  drawings, paths = [], []
  for chart in page.charts:
    png, svg = draw(chart)
    for suffix, content in ((".png", png), (".svg", svg.encode())):
      paths.append(folder / f"{chart.name}{suffix}")
      paths[-1].write_bytes(content)
    drawings.append(svg)
  paths.append(folder / "report.html")
  paths[-1].write_text(render(page, drawings, provenance), "utf-8")
  return paths


def render(page: Page, drawings: Sequence[str], provenance: Mapping[str, Any]) -> str:
  """The page, with nothing outside of it."""
  esc = html.escape
  figures = "".join(
    f"<figure>{svg[svg.index('<svg') :]}<figcaption>{esc(chart.caption)}</figcaption></figure>\n"
    for chart, svg in zip(page.charts, drawings, strict=True)
  )
  head, *body = cells(page.rows, page.columns)
  table = f"<tr>{''.join(f'<th>{esc(cell)}</th>' for cell in head)}</tr>\n" + "".join(
    f"<tr>{''.join(f'<td>{esc(cell)}</td>' for cell in line)}</tr>\n" for line in body
  )
  made = ", ".join(f"{esc(str(key))} {esc(str(value))}" for key, value in provenance.items())
  findings = "".join(f"<li>{esc(finding)}</li>\n" for finding in page.findings)
  return (
    f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{esc(page.title)}'
    f'</title>\n<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
    f"<body>\n<h1>{esc(page.title)}</h1>\n<p>{esc(page.question)}</p>\n<p>{esc(page.setup)}</p>\n"
    f"<ul>\n{findings}</ul>\n{figures}<div><table>\n{table}</table></div>\n<p>{made}</p>\n</body>\n"
    "</html>\n"
  )


def draw(chart: Chart, with_png: bool = True) -> tuple[bytes, str]:
  """(PNG or nothing, SVG)."""
  import matplotlib
  from matplotlib.figure import Figure

  settings: dict[str, Any] = {
    "font.size": 11, "svg.fonttype": "none", "svg.hashsalt": chart.name, "axes.axisbelow": True,
    "font.family": "sans-serif", "hatch.linewidth": 0.6,
  }  # fmt: skip
  with matplotlib.rc_context(settings):
    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    axes = figure.subplots()
    if isinstance(chart.content, Bars):
      _bars(axes, chart.content)
    else:
      _lines(axes, chart.content)
    _frame(axes, chart)
    png, svg = io.BytesIO(), io.StringIO()
    if with_png:
      figure.savefig(png, format="png", dpi=120, metadata={"Software": None})
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
  return png.getvalue(), svg.getvalue()


def _lines(axes: Any, lines: Sequence[Line]) -> None:
  for i, line in enumerate(lines):
    axes.plot(
      line.x, line.y, color=COLOURS[i % 8], label=line.label, markersize=6, linewidth=1.8,
      linestyle=DASHES[i % 8] if line.joined else "",
      marker=MARKERS[(i + i // 8) % 8] if line.markers else "",
      drawstyle="steps-post" if line.steps else "default",
    )  # fmt: skip
    for j, (x, y, words) in enumerate(zip(line.x, line.y, line.texts, strict=False)):
      axes.annotate(
        words, (x, y), xytext=(0, 8 if j % 2 else -17), textcoords="offset points", fontsize=9,
        color=COLOURS[i % 8], ha="center", bbox=_HALO,
      )  # fmt: skip


def _round_ticks(axis: Any) -> None:
  """1, 2 and 5 times powers of ten, written out, where decades are few; else powers alone."""
  from matplotlib.ticker import LogLocator, NullLocator

  low, high = axis.get_view_interval()
  few = low > 0 and math.log10(high / low) < 3
  axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=20))
  axis.set_minor_locator(NullLocator())
  axis.set_major_formatter("{x:,.10g}")


def _bars(axes: Any, bars: Bars) -> None:
  width = 0.84 / len(bars.series)
  for i, (label, values) in enumerate(bars.series.items()):
    places = [group + (i - (len(bars.series) - 1) / 2) * width for group in range(len(values))]
    drawn = axes.bar(
      places, [value or 0 for value in values], width * 0.94, label=label, color=COLOURS[i % 8],
      hatch=HATCHES[i % 8], edgecolor="white", linewidth=0.6,
    )  # fmt: skip
    texts = ["-" if value is None else bars.format.format(value) for value in values]
    axes.bar_label(drawn, texts, fontsize=8, padding=2)
  longest = max(len(line) for group in bars.groups for line in group.split("\n"))
  slanted = longest * len(bars.groups) > 90
  axes.set_xticks(
    range(len(bars.groups)), bars.groups, rotation=30 if slanted else 0,
    ha="right" if slanted else "center",
  )  # fmt: skip
  axes.margins(y=0.12)


def _frame(axes: Any, chart: Chart) -> None:
  axes.set_title(chart.title, loc="left", fontsize=12)
  axes.set_xlabel(chart.x_label)
  axes.set_ylabel(chart.y_label)
  if chart.log_x:
    axes.set_xscale("log")
    _round_ticks(axes.xaxis)
  if chart.log_y:
    axes.set_yscale("log")
    _round_ticks(axes.yaxis)
  if chart.ticks:
    axes.set_xticks(chart.ticks, [f"{tick:,.10g}" for tick in chart.ticks])
    axes.minorticks_off()
  for value, words in chart.levels:
    axes.axhline(value, color="#1c1e21", linewidth=1.2, linestyle=(0, (6, 3)))
    axes.annotate(
      words, (0.99, value), xycoords=("axes fraction", "data"), xytext=(0, 4), fontsize=9,
      textcoords="offset points", ha="right", bbox=_HALO,
    )  # fmt: skip
  for value, words in chart.verticals:
    axes.axvline(value, color="#5c6370", linewidth=1.2, linestyle=(0, (2, 2)))
    axes.annotate(
      words, (value, 0.98), xycoords=("data", "axes fraction"), xytext=(4, 0), fontsize=9,
      textcoords="offset points", va="top", color="#3c4048", bbox=_HALO,
    )  # fmt: skip
  if chart.y_from is not None:
    axes.set_ylim(bottom=chart.y_from)
  axes.grid(True, color="#e3e5e9", linewidth=0.8)
  axes.spines[["top", "right"]].set_visible(False)
  labels = axes.get_legend_handles_labels()[1]
  if len(labels) > 1 and isinstance(chart.content, Bars):
    axes.figure.legend(
      loc="outside lower center", ncols=4 if len(labels) == 4 else 3, frameon=False, fontsize=9.5
    )
  elif len(labels) > 1:
    axes.legend(frameon=True, framealpha=0.9, edgecolor="#e3e5e9", fontsize=9.5)


_HALO = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c1e21; background: #fff; }
figure { margin: 2rem 0; } figure svg { width: 100%; height: auto; }
figcaption, p:last-child { color: #5c6370; font-size: 0.9rem; }
div { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums;
  font-size: 0.85rem; } th, td { text-align: right; padding: 0.2rem 0.6rem; white-space: nowrap;
  border-bottom: 1px solid #e3e5e9; } th { font-weight: 600; }
"""
