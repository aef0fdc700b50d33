"""First tokens of short and long prompts, and gaps, against the threshold."""

from experiments import report, served
from experiments.threshold.run import load_of

COLUMNS = (
  ("budget", "budget", "{:,}"),
  ("threshold", "long_prefill_token_threshold", "{:,}"),
  ("short TTFT p50 ms", "short_p50_ttft_ms", "{:,.0f}"),
  ("short TTFT p99 ms", "short_p99_ttft_ms", "{:,.0f}"),
  ("long TTFT p50 ms", "long_p50_ttft_ms", "{:,.0f}"),
  ("long TTFT p99 ms", "long_p99_ttft_ms", "{:,.0f}"),
  *served.COLUMNS[2:],
)


def page(config, rows):
  load = load_of(config)
  return report.Page(
    title="A cap on the tokens of one request in a step",
    question="Does long_prefill_token_threshold let short prompts past long ones, and what does it "
    "cost the long ones?",
    setup=f"{config.server.words()}; {len(load):,} requests at {load.rate:.2f} a second, "
    f"{config.long_share:.0%} with prompts of {config.long_prompt[0]:,} to "
    f"{config.long_prompt[1]:,} tokens; threshold 0 is no cap",
    findings=[findings(rows, budget) for budget in config.budgets],
    columns=COLUMNS,
    rows=rows,
    charts=[
      chart(config, rows, "short_ttft", "short_p99_ttft_ms", "short_p50_ttft_ms",
            "First token of short prompts"),
      chart(config, rows, "long_ttft", "long_p99_ttft_ms", "long_p50_ttft_ms",
            "First token of long prompts"),
      chart(config, rows, "gaps", "max_itl_ms", "p99_itl_ms", "Gap between tokens",
            ("longest", "p99")),
    ],
  )  # fmt: skip


def findings(rows, budget):
  mine = [row for row in rows if row["budget"] == budget]
  off = next(row for row in mine if not row["long_prefill_token_threshold"])
  best = min(mine, key=lambda row: row["short_p99_ttft_ms"])
  return (
    f"budget {budget:,}: short prompts' p99 TTFT is {off['short_p99_ttft_ms']:,.0f} ms without a "
    f"cap and {best['short_p99_ttft_ms']:,.0f} ms at a threshold of "
    f"{best['long_prefill_token_threshold']:,}; long prompts' median TTFT goes from "
    f"{off['long_p50_ttft_ms']:,.0f} to {best['long_p50_ttft_ms']:,.0f} ms, the longest gap from "
    f"{off['max_itl_ms']:.0f} to {best['max_itl_ms']:.0f} ms"
  )


def chart(config, rows, name, high, low, title, words=("p99", "median")):
  lines = []
  for budget in config.budgets:
    mine = [row for row in rows if row["budget"] == budget]
    mine.sort(key=lambda row: row["long_prefill_token_threshold"] or budget)
    at = [row["long_prefill_token_threshold"] or budget for row in mine]
    lines += [
      report.Line(label=f"{word}, budget {budget:,}", x=at, y=[row[key] for row in mine])
      for key, word in ((high, words[0]), (low, words[1]))
    ]
  ticks = sorted({t for t in config.thresholds if t} | set(config.budgets))
  return report.Chart(
    name=name, title=title, log_x=True, log_y=True, ticks=ticks,
    x_label="most tokens of one request in a step (the last point of a curve: no cap)",
    y_label="time (ms)", content=lines,
    caption="Without a cap a prompt may take the whole budget.",
  )  # fmt: skip
