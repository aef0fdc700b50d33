"""States by policy, and what was found."""

from experiments import report

COLUMNS = (
  ("policy", "policy", "{}"),
  ("variant", "variant", "{}"),
  ("overlap", "overlap", "{:d}"),
  ("prefix cache", "prefix_cache", "{:d}"),
  ("pages", "pages", "{}"),
  ("budget", "budget", "{}"),
  ("states", "states", "{:,}"),
  ("transitions", "transitions", "{:,}"),
  ("depth", "depth", "{}"),
  ("longest drain", "longest_drain", "{}"),
  ("longest idle", "longest_idle", "{}"),
  ("preempting", "preempting", "{:,}"),
  ("s", "seconds", "{:.1f}"),
  ("violation", "violation", "{}"),
)


def page(config, rows):
  return report.Page(
    title="Every reachable state of tiny schedulers",
    question="Does every law of the scheduler hold in every state that it can reach, and does "
    "every state drain?",
    setup=f"{config.rows} requests and rows, {' or '.join(map(str, config.pages))} pages of two "
    f"tokens, budgets {', '.join(map(str, config.budgets))}; arrivals, aborts, and steps after "
    "which any outputs end their requests, in every order",
    findings=findings(rows),
    columns=COLUMNS,
    rows=rows,
    charts=[chart(rows)],
  )


def findings(rows):
  states, transitions = (sum(row.get(k, 0) for row in rows) for k in ("states", "transitions"))
  broken = [row for row in rows if row["violation"]]
  drain = max(row.get("longest_drain", 0) for row in rows)
  found = [
    f"{len(rows)} searches, {states:,} states, {transitions:,} transitions, "
    f"{len(broken)} searches with a violation",
    f"every state without one drains within {drain} steps",
  ]
  return found + [
    f"{row['policy']}, {row['variant']}, {row['pages']} pages, budget {row['budget']}: "
    f"{row['violation']}"
    for row in broken
  ]


def chart(rows):
  policies = list(dict.fromkeys(row["policy"] for row in rows))

  def total(policy, overlap, cached):
    mine = [
      row["states"] for row in rows
      if (row["policy"], row["overlap"], row["prefix_cache"]) == (policy, overlap, cached)
      and row["variant"] == "plain"
    ]  # fmt: skip
    return sum(mine) or None

  kinds = {
    "no overlap": (False, False), "overlap": (True, False), "with a prefix cache": (False, True),
  }  # fmt: skip
  return report.Chart(
    name="states", title="Reachable states", x_label="policy", y_label="states", log_y=True,
    content=report.Bars(
      groups=policies,
      series={name: [total(p, *kind) for p in policies] for name, kind in kinds.items()},
      format="{:,.0f}",
    ),
    caption="All pages and budgets together.",
  )  # fmt: skip
