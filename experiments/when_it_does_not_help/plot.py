"""What chunking changes on each load: gaps, first tokens, throughput."""

from experiments import report, served
from experiments.when_it_does_not_help.run import MIXED, OFFLINE, UNIFORM

COLUMNS = (
  ("load", "load", "{}"),
  ("", "name", "{}"),
  ("makespan s", "makespan_s", "{:.1f}"),
  *served.COLUMNS,
)
CHARTS = (
  ("gaps", "p99_worst_gap_ms", "Longest gap of a request, p99 over requests",
   "longest gap, p99 (ms)"),
  ("ttft", "p99_ttft_ms", "Time to the first token, p99", "p99 time to first token (ms)"),
  ("throughput", "output_throughput", "Throughput", "output tokens/s"),
)  # fmt: skip


def named(rows):
  words = lambda row: f"budget {row['budget']:,}" if row["chunked"] else "unchunked"
  return [row | {"name": words(row)} for row in rows]


def page(config, rows):
  rows = named(rows)
  return report.Page(
    title="When chunking does not help",
    question="Chunking smooths mixed lengths under online load. What does it do where all prompts "
    "are short, or where nobody is waiting?",
    setup=f"{config.server.words()}; {UNIFORM}: {config.short_prompt} tokens in and out, "
    f"{config.short_rate:g} a second; {OFFLINE}: the requests of the third load, all at once; "
    f"{MIXED}: {config.mixed_rate:g} a second",
    findings=[findings(rows, load) for load in (UNIFORM, OFFLINE, MIXED)],
    columns=COLUMNS,
    rows=rows,
    charts=[chart(rows, *one) for one in CHARTS],
  )


def gain(rows, load, key):
  """(best chunked, unchunked) of a number that should be small."""
  mine = [row for row in rows if row["load"] == load]
  best = min(row[key] for row in mine if row["chunked"])
  return best, next(row[key] for row in mine if not row["chunked"])


def findings(rows, load):
  gap, whole_gap = gain(rows, load, "p99_worst_gap_ms")
  ttft, whole_ttft = gain(rows, load, "p99_ttft_ms")
  span, whole_span = gain(rows, load, "makespan_s")
  return (
    f"{load}: longest gap (p99) {gap:,.0f} ms at best with chunks, {whole_gap:,.0f} ms without; "
    f"p99 TTFT {ttft:,.0f} and {whole_ttft:,.0f} ms; the whole load takes {span:.1f} and "
    f"{whole_span:.1f} s"
  )


def chart(rows, name, key, title, label):
  loads = (UNIFORM, OFFLINE, MIXED)
  names = list(dict.fromkeys(row["name"] for row in rows))
  of = {(row["load"], row["name"]): row[key] for row in rows}
  return report.Chart(
    name=name, title=title, x_label="load", y_label=label, log_y=key != "output_throughput",
    content=report.Bars(
      groups=loads, series={n: [of[load, n] for load in loads] for n in names}, format="{:,.0f}"
    ),
    caption="The same load under three budgets and unchunked.",
  )  # fmt: skip
