"""A chart for every axis, and the table of verdicts."""

from experiments import report

COLUMNS = (
  ("part", "part", "{}"),
  ("call", "call", "{}"),
  ("against", "axis", "{}"),
  ("prefix cache", "prefix_cache", "{}"),
  ("expected", "expected", "{}"),
  ("first us", "first_us", "{:.0f}"),
  ("last us", "last_us", "{:.0f}"),
  ("grows", "growth", "{:.2f}"),
  ("x grows", "x_growth", "{:.0f}"),
  ("us per unit", "slope", "{:.3g}"),
  ("exponent", "exponent", "{:.2f}"),
  ("verdict", "verdict", "{}"),
)
BAR_US = 300


def page(points, verdicts, setup):
  """What a run has to say."""
  hosts = [one for one in points if one["part"] == "host"]
  return report.Page(
    title="What a step costs as everything grows",
    question="Linear where it must be, flat where it must be? And what does the host cost?",
    setup=setup,
    findings=findings(verdicts, hosts),
    columns=COLUMNS,
    rows=verdicts,
    charts=[*model_charts(points), *scheduler_charts(points), *host_chart(hosts)],
  )


def findings(verdicts, hosts):
  said = []
  for name in ("flat", "linear", "grows without need"):
    count = sum(one["verdict"] == name for one in verdicts)
    said += [f"{count} of {len(verdicts)} series: {name}"] if verdicts else []
  said += [
    f"grows without need: {label(one)} against {one['axis']}, {one['growth']:.2f} times"
    for one in verdicts if one["verdict"] == "grows without need"
  ]  # fmt: skip
  return said + [
    f"host time, {one['rows']} rows, prefix cache {'on' if one['prefix_cache'] else 'off'}, "
    f"{one['checkout']} ({one['commit']}): {one['host_us']:.0f} us of a step of "
    f"{one['step_us']:.0f} us (bar: {BAR_US} us at 32 rows)"
    for one in hosts
  ]


def label(one):
  cached = " with prefix cache" if one.get("prefix_cache") else ""
  return f"{one['call']}{cached}" if one["part"] == "scheduler" else "step"


def lines(points, divide=1.0):
  series = {}
  for one in points:
    series.setdefault(label(one), []).append(one)
  return [
    report.Line(label=name, x=[p["x"] for p in some], y=[p["us"] / divide for p in some])
    for name, some in series.items()
  ]


def model_charts(points):
  charts = []
  for axis in dict.fromkeys(p["axis"] for p in points if p["part"] == "model"):
    some = [p for p in points if p["part"] == "model" and p["axis"] == axis]
    flat = some[0]["expected"] == "flat"
    charts.append(report.Chart(
      name=f"step_{axis.replace(' ', '_')}", title=f"Step of the model against {axis}",
      x_label=axis, y_label="milliseconds", content=lines(some, 1e3), log_x=flat, y_from=0.0,
      caption="The forward pass and the head, alone; the least of the rounds' medians.",
    ))  # fmt: skip
  return charts


def scheduler_charts(points):
  charts = []
  for axis in dict.fromkeys(p["axis"] for p in points if p["part"] == "scheduler"):
    some = [p for p in points if p["part"] == "scheduler" and p["axis"] == axis]
    charts.append(report.Chart(
      name=f"scheduler_{axis.replace(' ', '_')}", title=f"Calls of the scheduler against {axis}",
      x_label=axis, y_label="microseconds", content=lines(some), log_x=True, y_from=0.0,
      caption="Each call until its result is there.",
    ))  # fmt: skip
  return charts


def host_chart(hosts):
  if not hosts:
    return []
  groups = list(dict.fromkeys((p["rows"], p["prefix_cache"]) for p in hosts))
  series = {}
  for name in dict.fromkeys(p["checkout"] for p in hosts):
    values = {(p["rows"], p["prefix_cache"]): p["host_us"] for p in hosts if p["checkout"] == name}
    series[name] = [values[group] for group in groups]
  return [report.Chart(
    name="host", title="Host time of a step", x_label="", y_label="microseconds",
    content=report.Bars(
      groups=[f"{rows} rows{', prefix cache' if prefix else ''}" for rows, prefix in groups],
      series=series, format="{:.0f}",
    ), levels=((BAR_US, f"bar at 32 rows: {BAR_US} us"),),
    caption="A step of the engine with programs that compute nothing.",
  )]  # fmt: skip
