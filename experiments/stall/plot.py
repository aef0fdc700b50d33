"""The stall against the budget, the prompt's own wait, and the streams' tokens over time."""

from experiments import report
from experiments.stall.run import timeline

COLUMNS = (
  ("", "name", "{}"),
  ("decode ms", "decode_ms", "{:.2f}"),
  ("longest gap ms", "longest_gap_ms", "{:,.1f}"),
  ("by the formula", "predicted_longest_ms", "{:,.1f}"),
  ("times a decode", "spike", "{:,.0f}"),
  ("median gap ms", "p50_gap_during_ms", "{:,.1f}"),
  ("chunks", "chunks", "{}"),
  ("prompt's TTFT ms", "long_ttft_ms", "{:,.0f}"),
  ("by the formula ", "predicted_ttft_ms", "{:,.0f}"),
  ("tok/s meanwhile", "tokens_during_per_s", "{:,.0f}"),
)


def named(rows):
  words = lambda row: f"{row['budget']:,}" if row["chunked"] else "unchunked"
  return [row | {"name": words(row)} for row in rows]


def page(config, rows):
  chunked, whole = [row for row in rows if row["chunked"]], rows[-1]
  best = min(chunked, key=lambda row: row["longest_gap_ms"])
  return report.Page(
    title="One long prompt among streams, in simulation",
    question="For how long does a long prompt stop the streams that are being read, and what does "
    "it cost the prompt itself to be cut into chunks?",
    setup=f"{config.server.words()}; {config.decoders} streams at {config.context:,} tokens of "
    f"context when a prompt of {config.prompt:,} tokens arrives",
    findings=[
      f"unchunked, the streams stand still for {whole['longest_gap_ms'] / 1e3:.2f} s, "
      f"{whole['spike']:.0f} times their {whole['decode_ms']:.1f} ms a token",
      f"at a budget of {best['budget']:,} the longest gap is {best['longest_gap_ms']:.0f} ms and "
      f"the prompt waits {best['long_ttft_ms'] / 1e3:.2f} s instead of "
      f"{whole['long_ttft_ms'] / 1e3:.2f} s",
      "simulation and formula differ by "
      f"{max(abs(r['longest_gap_ms'] / r['predicted_longest_ms'] - 1) for r in rows):.1%} at most "
      "in the longest gap",
    ],
    columns=COLUMNS,
    rows=named(rows),
    charts=[stall(chunked, whole), over_time(config, chunked)],
  )  # fmt: skip


def stall(chunked, whole):
  budgets = [row["budget"] for row in chunked]
  values = lambda key: [row[key] for row in chunked]
  return report.Chart(
    name="stall", title="What the budget does to the streams and to the prompt",
    x_label="token budget of a step (tokens)", y_label="time (ms)", log_x=True, log_y=True,
    content=[
      report.Line(label="the prompt's time to first token", x=budgets, y=values("long_ttft_ms")),
      report.Line(label="longest gap of the streams", x=budgets, y=values("longest_gap_ms")),
      report.Line(label="median gap meanwhile", x=budgets, y=values("p50_gap_during_ms")),
    ],
    levels=[
      (whole["longest_gap_ms"], f"longest gap unchunked: {whole['longest_gap_ms']:,.0f} ms"),
      (whole["decode_ms"], f"decodes alone: {whole['decode_ms']:.1f} ms"),
    ],
    ticks=budgets, y_from=5,
    caption="The longest gap is the last full chunk, which attends to nearly the whole prompt.",
  )  # fmt: skip


def over_time(config, chunked):
  shown = [chunked[0]["budget"], min((r["budget"] for r in chunked), key=lambda b: abs(b - 2048))]
  lines = []
  for budget in dict.fromkeys([*shown, None]):
    seconds, count = timeline(config, budget)
    keep = seconds < 2.4
    words = "unchunked" if budget is None else f"budget {budget:,}"
    lines.append(
      report.Line(label=words, x=list(seconds[keep]), y=list(count[keep]), markers=False,
                  steps=True)
    )  # fmt: skip
  return report.Chart(
    name="timeline", title=f"Tokens that the {config.decoders} streams have received",
    x_label="time since the long prompt arrived (s)", y_label="tokens of all streams together",
    content=lines, verticals=[(0.0, "the prompt arrives")],
    caption="A flat stretch is a stall. With a budget the curve goes on, more slowly, until the "
    "prompt is done.",
  )  # fmt: skip
