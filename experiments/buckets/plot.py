"""Padding against the number of buckets, and where a load's steps lie."""

import numpy as np

from experiments import report

COLUMNS = (
  ("load", "load", "{}"),
  ("policy", "policy", "{}"),
  ("table", "name", "{}"),
  ("buckets", "count", "{}"),
  ("padding", "padding_share", "{:.2%}"),
  ("cost", "padded_cost", "{:.3f}"),
  ("", "buckets", "{}"),
)


def page(rows, counts, setup):
  """Rows of all loads; counts by load."""
  default = [row for row in rows if row["name"] == "default"]
  return report.Page(
    title="Which token buckets pad a load least",
    question="How much of what steps compute is padding, and how many executables would help?",
    setup=setup,
    findings=[
      f"{row['load']}, {row['policy']}: {row['padding_share']:.1%} of all tokens in steps are "
      f"padding with the {row['count']} default buckets"
      for row in default
    ],
    columns=COLUMNS,
    rows=rows,
    charts=[against_count(rows), where_steps_lie(counts)],
  )


def against_count(rows):
  best = [row for row in rows if row["name"] != "default"]
  default = [row for row in rows if row["name"] == "default"]
  drawn = lambda label, part, joined: report.Line(
    label=label, x=[row["count"] for row in part], joined=joined,
    y=[100 * row["padding_share"] for row in part],
  )  # fmt: skip
  keys = dict.fromkeys((row["load"], row["policy"]) for row in best)
  lines = [
    drawn(", ".join(key), [row for row in best if (row["load"], row["policy"]) == key], True)
    for key in keys
  ]
  lines.append(drawn("default table, each load and policy", default, False))
  return report.Chart(
    name="padding", title="Padding against the number of buckets", x_label="token buckets",
    y_label="padding, % of all tokens in steps", content=lines, y_from=0.0,
    caption="Best: by dynamic programming over the token counts of the load's own steps.",
  )  # fmt: skip


def where_steps_lie(counts):
  lines = []
  for name, count in counts.items():
    tokens = np.arange(1, len(count))
    share = np.cumsum(count[1:] * tokens) / max((count * np.arange(len(count))).sum(), 1)
    lines.append(report.Line(label=name, x=tokens.tolist(), y=(100 * share).tolist(),
                             markers=False))  # fmt: skip
  return report.Chart(
    name="steps", title="Tokens by the size of their step", x_label="tokens of a step", log_x=True,
    y_label="% of all tokens, in steps up to this size", content=lines,
  )  # fmt: skip
