"""The page of a run: latencies over time and as a distribution, with the objectives."""

import numpy as np

from experiments import report

COLUMNS = (
  ("", "name", "{}"),
  ("mean", "mean", "{:,.1f}"),
  ("p50", "p50", "{:,.1f}"),
  ("p90", "p90", "{:,.1f}"),
  ("p99", "p99", "{:,.1f}"),
  ("max", "max", "{:,.1f}"),
)
_NAMES = {
  "ttft": "time to first token, ms", "tpot": "time per output token, ms",
  "itl": "inter-token latency, ms", "e2el": "end to end, ms",
}  # fmt: skip


def rows(found):
  """One a latency, for the table."""
  return [
    {"name": text}
    | {key: found[f"{key}_{name}_ms"] for key in ("mean", "p50", "p90", "p99", "max")}
    for name, text in _NAMES.items()
  ]


def findings(found):
  said = [
    f"{found['completed']} of {found['num_prompts']} requests completed in "
    f"{found['duration']:.1f} s: {found['request_throughput']:.2f} requests/s, "
    f"{found['output_throughput']:,.0f} output tokens/s",
    f"this client sent {found['client_late']} requests late; its lag: p50 "
    f"{found['client_lag_p50_ms']:.2f} ms, at most {found['client_lag_max_ms']:.1f} ms",
  ]
  if "request_goodput" in found:
    said.append(
      f"goodput {found['request_goodput']:.2f} requests/s: {100 * found['good_share']:.1f}% kept "
      "all objectives"
    )
  return said + [f"failed: {error}" for error in found["errors"]]


def page(config, found, sent):
  done = [one for one in sent[config.warm_up :] if one.token_times_s]
  first = [1e3 * (one.token_times_s[0] - one.sent_s) for one in done]
  gaps = 1e3 * np.concatenate([np.diff(one.token_times_s) for one in done] or [np.empty(0)])
  slo = config.slo
  level = lambda value: [] if value is None else [(1e3 * value, "objective")]
  shares = np.linspace(0, 100, 101)
  charts = [
    report.Chart(
      name="ttft", title="Time to first token", x_label="sent at, s", y_label="ms",
      content=[report.Line(label="request", x=[o.sent_s for o in done], y=first, joined=False)],
      levels=level(slo and slo.ttft_s), y_from=0,
    )
  ]  # fmt: skip
  if len(gaps):
    values = np.percentile(gaps, shares)
    charts.append(
      report.Chart(
        name="itl", title="Inter-token latency", x_label="percentile", y_label="ms",
        content=[report.Line(label="gaps", x=shares, y=values, markers=False)],
        levels=level(slo and slo.itl_s), y_from=0,
      )
    )  # fmt: skip
  return report.Page(
    title="A server under load",
    question="What do its users wait for?",
    setup=f"{found['num_prompts']} requests to {config.url}/v1/{config.endpoint} at "
    f"{found['request_rate']:.2f} a second, open loop, {config.warm_up} more before them",
    findings=findings(found), columns=COLUMNS, rows=rows(found), charts=charts,
  )  # fmt: skip
