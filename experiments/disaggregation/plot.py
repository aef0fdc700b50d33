"""Objectives kept against the rate, the trade, and what a slow link costs."""

from experiments import report, served
from experiments.disaggregation.run import load_of

COLUMNS = (
  ("", "name", "{}"),
  ("req/s sent", "rate", "{:g}"),
  ("link GB/s", "link_gb_s", "{:g}"),
  ("kept, pace", "kept_pace", "{:.1%}"),
  ("kept, gaps", "kept_gap", "{:.1%}"),
  ("transfer p50 ms", "p50_sent_ms", "{:.1f}"),
  ("transfer p99 ms", "p99_sent_ms", "{:.1f}"),
  ("first gap p99 ms", "p99_second_gap_ms", "{:.1f}"),
  *served.COLUMNS,
)


def name_of(config, prefill):
  if not prefill:
    return f"{config.gpus} mixed"
  return f"{prefill} prefill + {config.gpus - prefill} decode"


def page(config, rows):
  name, load = load_of(config)
  rows = [row | {"name": name_of(config, row["prefill"])} for row in rows]
  rates = [row for row in rows if row["part"] == "rate"]
  return report.Page(
    title="Prefill and decode on GPUs of their own",
    question=f"Are {config.gpus} GPUs better used alike, with chunked prefill, or split into some "
    "that prefill and some that decode?",
    setup=f"{config.server.words()}, {config.gpus} of them, routed to the least loaded; {name}, "
    f"{len(load):,} requests; objectives: first token within {config.ttft_slo_ms:g} ms and either "
    f"a mean gap within {config.pace_slo_ms:g} ms (pace) or every gap within "
    f"{config.gap_slo_ms:g} ms. "
    "Simplifications: see jaxserve/sim/disaggregate.py",
    findings=[best_at(config, rates, "pace"), best_at(config, rates, "gap"), links(rows)],
    columns=COLUMNS,
    rows=rows,
    charts=[
      kept(config, rates, "pace", f"a mean gap within {config.pace_slo_ms:g} ms"),
      kept(config, rates, "gap", f"every gap within {config.gap_slo_ms:g} ms"),
      trade(config, rates),
      link_chart(rows),
    ],
  )  # fmt: skip


def best_at(config, rows, which):
  """At each rate, who keeps the objectives for most requests."""
  words = []
  for rate in config.rates:
    mine = [row for row in rows if row["rate"] == rate]
    best = max(mine, key=lambda row: row[f"kept_{which}"])
    words.append(f"{rate:g}/s: {best['name']} ({best[f'kept_{which}']:.0%})")
  return f"most requests within the objectives of {which} at {'; '.join(words)}"


def links(rows):
  mine = sorted((row for row in rows if row["part"] == "link"), key=lambda row: row["link_gb_s"])
  slow, fast = mine[0], mine[-1]
  return (
    f"{slow['name']} at {slow['rate']:g}/s: from {fast['link_gb_s']:g} to "
    f"{slow['link_gb_s']:g} GB/s the gap after the first token (p99) grows from "
    f"{fast['p99_second_gap_ms']:,.0f} to {slow['p99_second_gap_ms']:,.0f} ms; the first "
    "token itself does not wait for the link"
  )


def kept(config, rows, which, words):
  lines = []
  for prefill in config.prefill:
    mine = [row for row in rows if row["prefill"] == prefill]
    lines.append(
      report.Line(
        label=name_of(config, prefill), x=[row["rate"] for row in mine],
        y=[100 * row[f"kept_{which}"] for row in mine],
      )
    )  # fmt: skip
  return report.Chart(
    name=f"kept_{which}",
    title=f"First token within {config.ttft_slo_ms:g} ms and {words}",
    x_label="requests a second, all GPUs together", y_label="requests that keep both (%)",
    content=lines, y_from=0,
    caption="The gap after the first token includes the transfer of the KV.",
  )  # fmt: skip


def trade(config, rows):
  rate = config.rates[len(config.rates) // 2]
  mine = [row for row in rows if row["rate"] == rate]
  return report.Chart(
    name="trade", title=f"First token against longest gap, at {rate:g} requests a second",
    x_label="longest gap of a request, p99 over requests (ms)",
    y_label="p99 time to first token (ms)", log_x=True, log_y=True,
    content=[
      report.Line(label=row["name"], x=[row["p99_worst_gap_ms"]], y=[row["p99_ttft_ms"]],
                  joined=False)
      for row in mine
    ],
    caption="Down and to the left is better.",
  )  # fmt: skip


def link_chart(rows):
  mine = sorted((row for row in rows if row["part"] == "link"), key=lambda row: row["link_gb_s"])
  at = [row["link_gb_s"] for row in mine]
  names = {"p99_second_gap_ms": "gap after the first token, p99", "p99_sent_ms": "transfer, p99",
           "p50_sent_ms": "transfer, median"}  # fmt: skip
  return report.Chart(
    name="link", title=f"What the link costs: {mine[0]['name']} at {mine[0]['rate']:g} requests/s",
    x_label="bandwidth out of each GPU that prefills (GB/s)", y_label="time (ms)",
    log_x=True, log_y=True,
    content=[report.Line(label=w, x=at, y=[row[k] for row in mine]) for k, w in names.items()],
    caption="Waiting for the link included; one transfer at a time.",
  )  # fmt: skip
