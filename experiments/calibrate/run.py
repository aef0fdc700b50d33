"""From measured steps to a profile, and what to say about it."""

import dataclasses
import os

import jax
import numpy as np

from experiments import report
from experiments.calibrate import measure
from jaxserve import cost_profile
from jaxserve.cost_profile import Profile

UNITS = {
  "step_s": ("a step", 1e3, "ms"),
  "token_s": ("a token of the bucket", 1e6, "us"),
  "weights_s": ("reading the weights once", 1e3, "ms"),
  "pair_s": ("a query-key pair of a chunk", 1e9, "ns"),
  "kv_s": ("a cached token of a decode", 1e6, "us"),
  "row_s": ("a decode besides", 1e6, "us"),
  "head_row_s": ("a row of the head", 1e6, "us"),
}
COLUMNS = (
  ("steps", "kind", "{}"),
  ("kinds", "count", "{}"),
  ("shortest ms", "least_ms", "{:.2f}"),
  ("longest ms", "most_ms", "{:.1f}"),
  ("error p50", "median", "{:.1%}"),
  ("p90", "p90", "{:.1%}"),
  ("largest", "max", "{:.1%}"),
  ("mean", "bias", "{:+.1%}"),
  ("spread of rounds", "spread", "{:.1%}"),
)


def calibrate(engine, name, observations):
  """(profile, fit) of what was observed, by medians over rounds."""
  found = cost_profile.fit([o.work for o in observations], [o.median for o in observations])
  config = engine.config
  profile = Profile(
    model=name, device=f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
    dtype=config.dtype, num_params=config.model.num_params, row_buckets=config.rows,
    costs=found.costs,
  )  # fmt: skip
  return profile, found


def residuals(observations, found):
  """Errors by kind of step, and of all."""
  kinds = np.array([o.kind for o in observations])
  rows = []
  for kind in (*dict.fromkeys(kinds.tolist()), "all"):
    chosen = np.flatnonzero((kinds == kind) | (kind == "all"))
    part = dataclasses.replace(found, errors=found.errors[chosen])
    times = 1e3 * np.array([observations[i].median for i in chosen])
    spread = [np.ptp(observations[i].seconds) / observations[i].median for i in chosen]
    rows.append({
      "kind": kind, "count": len(chosen), "least_ms": round(float(times.min()), 3),
      "most_ms": round(float(times.max()), 3), "spread": round(float(np.median(spread)), 4),
      **{key: round(value, 4) for key, value in part.quality().items()},
    })  # fmt: skip
  return rows


def words(costs):
  """A line a cost."""
  lines = []
  for key, (what, factor, unit) in UNITS.items():
    lines.append(f"{what:28} {factor * getattr(costs, key):10.4g} {unit}")
  return lines


def page(config, profile, observations, found, rows):
  whole = rows[-1]
  return report.Page(
    title="What a step of the engine takes",
    question="Do seven costs explain the steps of the engine on this machine?",
    setup=f"{profile.model} in {profile.dtype} on {profile.device}, budget {config.budget}, "
    f"{config.seats} seats; {len(observations)} kinds of steps, medians of {config.rounds} rounds",
    findings=[
      f"half of the steps are predicted within {whole['median']:.1%}, nine of ten within "
      f"{whole['p90']:.1%}; the same step differs by {whole['spread']:.1%} between rounds",
      "; ".join(" ".join(line.split()) for line in words(profile.costs)),
    ],
    columns=COLUMNS, rows=rows,
    charts=[
      report.Chart(
        name="steps", title="Steps of the engine, measured and by the fitted costs", log_x=True,
        log_y=True, x_label="measured time of a step (ms)", y_label="predicted time (ms)",
        content=points(observations, found),
        caption="On the line, prediction and measurement agree.",
      )
    ],
  )  # fmt: skip


def points(observations, found):
  lines = []
  for kind in dict.fromkeys(o.kind for o in observations):
    chosen = [i for i, o in enumerate(observations) if o.kind == kind]
    measured = [1e3 * observations[i].median for i in chosen]
    predicted = [m * (1 + found.errors[i]) for m, i in zip(measured, chosen, strict=True)]
    lines.append(report.Line(label=kind, x=measured, y=predicted, joined=False))
  ends = [1e3 * f(o.median for o in observations) for f in (min, max)]
  return [*lines, report.Line(label="equal", x=ends, y=ends, markers=False)]


def plans_of(config, engine):
  return measure.design(engine.config.buckets, config.seats, config.length)
