"""Capacity of every policy, and where each stands between TTFT and ITL."""

from experiments import report, served
from experiments.policies.run import loads_of

COLUMNS = (
  ("load", "load", "{}"),
  ("policy", "policy", "{}"),
  ("budget", "budget", "{:,}"),
  ("capacity req/s", "capacity_per_s", "{:.2f}"),
  ("kept", "kept", "{:.0%}"),
  *served.COLUMNS,
)


def page(config, rows):
  loads = loads_of(config)
  words = "; ".join(
    f"{name}: {len(load):,} requests, prompts of {load.num_prompt.mean():,.0f} tokens on average, "
    f"{load.num_prompt.max():,} at most, {load.num_output.mean():,.0f} outputs, latencies at "
    f"{load.rate:.2f} a second"
    for name, load in loads.items()
  )
  return report.Page(
    title="All policies on the same loads",
    question="Which scheduling policy carries how much load within objectives, and what does each "
    "do to the first token and to the gaps between tokens?",
    setup=f"{config.server.words()}; {words}; objectives: first token within "
    f"{config.ttft_slo_ms / 1e3:g} s and every gap within {config.itl_slo_ms:g} ms "
    f"for {config.share:.0%} of the requests",
    findings=[finding for name in loads for finding in findings(config, rows, name)],
    columns=COLUMNS,
    rows=rows,
    charts=[
      capacity(config, rows, list(loads)),
      latencies(
        config,
        rows,
        list(loads),
        "gaps",
        "p99_worst_gap_ms",
        "Longest gap of a request, p99 over requests",
        "longest gap, p99 (ms)",
      ),
      latencies(
        config,
        rows,
        list(loads),
        "ttft",
        "p99_ttft_ms",
        "Time to the first token, p99",
        "p99 time to first token (ms)",
      ),
    ],
  )


def findings(config, rows, name):
  mine = sorted((r for r in rows if r["load"] == name), key=lambda r: -r["capacity_per_s"])
  best, worst = mine[0], mine[-1]
  quickest = min(mine, key=lambda row: row["p50_ttft_ms"])
  return [
    f"{name}: most load within the objectives {best['policy']} ({best['capacity_per_s']:.2f} "
    f"requests/s), least {worst['policy']} ({worst['capacity_per_s']:.2f})",
    f"{name}: shortest median TTFT {quickest['policy']} "
    f"({quickest['p50_ttft_ms']:,.0f} ms), whose longest gap is {quickest['max_itl_ms']:,.0f} ms",
  ]


def capacity(config, rows, names):
  of = {(row["load"], row["policy"]): row["capacity_per_s"] for row in rows}
  return report.Chart(
    name="capacity", title="Highest rate that keeps the objectives",
    x_label="policy", y_label="capacity (requests/s)",
    content=report.Bars(
      groups=list(config.policies),
      series={name: [of.get((name, policy)) for policy in config.policies] for name in names},
      format="{:.2f}",
    ),
    caption=f"{config.share:.0%} of the requests have their first token within "
    f"{config.ttft_slo_ms / 1e3:g} s and no gap above {config.itl_slo_ms:g} ms.",
  )  # fmt: skip


def latencies(config, rows, names, name, key, title, label):
  of = {(row["load"], row["policy"]): row[key] for row in rows}
  return report.Chart(
    name=name, title=title, x_label="policy", y_label=label, log_y=True,
    content=report.Bars(
      groups=list(config.policies),
      series={load: [of.get((load, policy)) for policy in config.policies] for load in names},
      format="{:,.0f}",
    ),
    caption="At the rates named above. What sets the policies that cut prompts apart from the "
    "others is the gap.",
  )  # fmt: skip
