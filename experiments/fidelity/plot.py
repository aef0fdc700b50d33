"""Measured and predicted figures, side by side."""

from experiments import report
from experiments.fidelity.run import FIGURES, within

TITLES = {
  "p50_itl_ms": ("ITL p50 ms", "{:.1f}"), "p99_itl_ms": ("ITL p99 ms", "{:.0f}"),
  "p50_ttft_ms": ("TTFT p50 ms", "{:.0f}"), "p99_ttft_ms": ("TTFT p99 ms", "{:.0f}"),
  "makespan_s": ("makespan s", "{:.2f}"),
}  # fmt: skip
COLUMNS = (
  ("load", "load", "{}"),
  ("figure", "figure", "{}"),
  ("measured", "measured", "{:.4g}"),
  ("live runs", "runs", "{}"),
  ("spread", "spread", "{:.1%}"),
  ("predicted", "predicted", "{:.4g}"),
  ("error", "error", "{:+.1%}"),
  ("ok", "ok", "{}"),
)


def table(rows):
  lines = []
  for row in rows:
    for key in FIGURES:
      title, form = TITLES[key]
      lines.append({
        "load": f"{row['share']:.0%}, {row['rate']:g}/s", "figure": title, "measured": row[key],
        "runs": " ".join(form.format(one[key]) for one in row["runs"]),
        "spread": row[f"spread_{key}"], "predicted": row[f"predicted_{key}"],
        "error": row[f"error_{key}"], "ok": "yes" if within(row, key) else "no",
      })  # fmt: skip
  return lines


def page(config, rows, profile, residuals):
  lines = table(rows)
  good = sum(line["ok"] == "yes" for line in lines)
  close = sum(abs(line["error"]) <= 0.1 for line in lines)
  worst = max(lines, key=lambda line: abs(line["error"]))
  averages = rows[0]["load_average"]
  return report.Page(
    title="A live run, predicted from calibration alone",
    question="Does the simulator, with step times calibrated on this machine, predict what the "
    "engine does under a load it was not calibrated with?",
    setup=f"{profile.model} in {profile.dtype} on {profile.device}; budget {config.engine.budget}, "
    f"{config.engine.seats} seats, {config.requests} requests a run, {config.repeats} live runs; "
    f"load average of the machine {min(averages):.1f} to {max(averages):.1f}",
    findings=[
      f"{close} of {len(lines)} figures are within 10%; {good} within 10% or the spread of the "
      "live runs",
      f"the largest error is {worst['error']:+.1%}, of {worst['figure']} at {worst['load']}",
      f"the calibration explains half of its own steps within {residuals[-1]['median']:.1%}; the "
      f"same step differs by {residuals[-1]['spread']:.1%} between its rounds",
    ],
    columns=COLUMNS, rows=lines, charts=[chart(rows, key) for key in FIGURES],
  )  # fmt: skip


def chart(rows, key):
  title, _ = TITLES[key]
  shares = [100 * row["share"] for row in rows]
  what, _, unit = title.rpartition(" ")
  runs = zip(*([one[key] for one in row["runs"]] for row in rows), strict=True)
  return report.Chart(
    name=key, title=f"{what}, live runs and prediction", y_from=0.0,
    x_label="rate of arrivals (% of what a burst is served at)", y_label=f"{what} ({unit})",
    content=[
      report.Line(label="predicted", x=shares, y=[row[f"predicted_{key}"] for row in rows]),
      *(
        report.Line(label=f"live run {number}", x=shares, y=list(values), joined=False)
        for number, values in enumerate(runs, 1)
      ),
    ],
    caption="One calibration predicts all loads; nothing is fitted to these runs.",
  )  # fmt: skip
