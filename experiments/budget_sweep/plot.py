"""Latency against the budget, and the frontier."""

from experiments import report, served
from experiments.budget_sweep.run import load_of, solved

COLUMNS = (("budget", "budget", "{:,}"), *served.COLUMNS)


def page(config, rows):
  name, load = load_of(config)
  solution = solved(config, load)
  return report.Page(
    title=f"The token budget: {name}",
    question="What does the budget of a step do to the gap between tokens (ITL) and to the time to "
    "the first token (TTFT), and which budgets keep both objectives?",
    setup=f"{config.server.words()}; {len(load):,} requests at {load.rate:.2f} a second, prompts "
    f"of {load.num_prompt.mean():,.0f} tokens on average and {load.num_prompt.max():,} at most, "
    f"{load.num_output.mean():,.0f} outputs; objectives: every gap within {config.itl_slo_ms:g} "
    f"ms, first token within {config.ttft_slo_ms / 1e3:g} s",
    findings=findings(config, rows, solution),
    columns=COLUMNS,
    rows=rows,
    charts=[itl(config, rows, solution), ttft(config, rows), frontier(config, rows)],
  )


def findings(config, rows, solution):
  kept = [row["budget"] for row in rows if row["max_itl_ms"] <= config.itl_slo_ms]
  kept99 = [row["budget"] for row in rows if row["p99_itl_ms"] <= config.itl_slo_ms]
  best = max(rows, key=lambda row: row["request_goodput"])
  slowest, fastest = rows[0], max(rows, key=lambda row: row["budget"])
  answer = f"{solution.budget:,}" if solution.budget else "that no budget does"
  largest = lambda budgets: f"{max(budgets):,} tokens" if budgets else "none of these"
  return [
    f"largest budget whose longest gap keeps {config.itl_slo_ms:g} ms: {largest(kept)}; whose p99 "
    f"does: {largest(kept99)}; the solver says {answer} for the worst chunk after the "
    f"longest prompt, the GEMM-only rule {solution.gemm_only:,}",
    f"most requests within both objectives: {best['request_goodput']:.2f} a second at a budget of "
    f"{best['budget']:,}",
    f"from {slowest['budget']:,} to {fastest['budget']:,} tokens the longest gap grows from "
    f"{slowest['max_itl_ms']:,.0f} to {fastest['max_itl_ms']:,.0f} ms, p99 TTFT goes from "
    f"{slowest['p99_ttft_ms']:,.0f} to {fastest['p99_ttft_ms']:,.0f} ms",
  ]


def itl(config, rows, solution):
  budgets = [row["budget"] for row in rows]
  names = {"max_itl_ms": "longest", "p99_itl_ms": "p99 over tokens", "p50_itl_ms": "median"}
  return report.Chart(
    name="itl", title="Gap between two tokens of a stream", log_x=True, log_y=True,
    x_label="token budget of a step (tokens)", y_label="inter-token gap (ms)",
    content=[
      report.Line(label=words, x=budgets, y=[row[key] for row in rows])
      for key, words in names.items()
    ],
    ticks=budgets[::2], levels=[(config.itl_slo_ms, f"objective, {config.itl_slo_ms:g} ms")],
    verticals=[(solution.budget, f"solver: {solution.budget:,}")] if solution.budget else [],
    caption="A gap is one step; a step holds at most the budget, and late chunks of long prompts "
    "cost more, because they attend to all that came before.",
  )  # fmt: skip


def ttft(config, rows):
  budgets = [row["budget"] for row in rows]
  names = {"p99_ttft_ms": "p99", "p50_ttft_ms": "median"}
  return report.Chart(
    name="ttft", title="Time to the first token", log_x=True, log_y=True,
    x_label="token budget of a step (tokens)", y_label="time to first token (ms)",
    content=[
      report.Line(label=words, x=budgets, y=[row[key] for row in rows])
      for key, words in names.items()
    ],
    ticks=budgets[::2], levels=[(config.ttft_slo_ms, f"objective, {config.ttft_slo_ms:g} ms")],
    caption="Small budgets read the weights once for few tokens, so prompts queue.",
  )  # fmt: skip


def frontier(config, rows):
  return report.Chart(
    name="frontier", title="The frontier: each point is a budget", log_x=True, log_y=True,
    x_label="longest gap of a request, p99 over requests (ms)",
    y_label="p99 time to first token (ms)",
    content=[
      report.Line(
        label="budget in tokens", x=[row["p99_worst_gap_ms"] for row in rows],
        y=[row["p99_ttft_ms"] for row in rows], texts=[f"{row['budget']:,}" for row in rows],
      )
    ],
    levels=[(config.ttft_slo_ms, f"TTFT objective, {config.ttft_slo_ms:g} ms")],
    verticals=[(config.itl_slo_ms, f"ITL objective, {config.itl_slo_ms:g} ms")],
    caption="Down and to the left is better. A point that has another below and left of it is no "
    "choice at all.",
  )  # fmt: skip
