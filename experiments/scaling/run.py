"""All series: what is built for them, what is measured, and what it means."""

import dataclasses

from experiments import provenance
from experiments.scaling import bench, fit, host
from experiments.scaling.config import FLAT, LINEAR
from jaxserve.model import source
from jaxserve.progress import progress

_CALLS = ("schedule", "lay_out", "commit", "submit")


def run(config):
  """(points, verdicts): a row for every point of every series, and one for every series."""
  points = []
  if set(config.only) - {"host"}:
    weights = load(config)
    if "model" in config.only:
      points += model_points(config, weights)
    if {"sizes", "scheduler"} & set(config.only):
      points += size_points(config, weights)
  verdicts = judged(points)
  if "host" in config.only:
    count = config.host_rounds * 2 * (2 if config.base else 1)
    with progress(count, "processes", "Host time") as bar:
      points += host.measure(config, bar.advance)
  return points, verdicts


def load(config):
  """The model, with room for the longest max_model_len."""
  checkpoint = source.load_checkpoint(config.model, config.cache_dir, config.dtype)
  longest = max(config.lengths[-1], config.contexts[-1] + config.page_size)
  if checkpoint.config.max_position < longest:
    larger = dataclasses.replace(checkpoint.config, max_position=longest)
    checkpoint = dataclasses.replace(checkpoint, config=larger)
  return bench.Weights(checkpoint, config.dtype)


def model_points(config, weights):
  """Steps of the model against rows, context and tokens, on one engine."""
  rows, longest = config.rows[-1], config.contexts[-1] + config.page_size
  per_request = -(-longest // config.page_size)
  pages = max(
    config.contexts_rows * per_request, rows * (config.rows_context // config.page_size + 2)
  )
  budget = max(config.tokens[-1], rows)
  buckets = tuple(sorted({*config.rows, config.contexts_rows, *config.tokens, budget}))
  one = bench.Bench(weights, bench.engine_config(
    weights, rows=rows, length=longest, pages=pages, budget=budget, buckets=buckets,
    page_size=config.page_size,
  ), config.cache_dir)  # fmt: skip
  series = [
    ("decode rows", n, *one.decodes(n, config.rows_context), n) for n in config.rows
  ] + [
    ("decode context", n, *one.decodes(config.contexts_rows, n), config.contexts_rows)
    for n in config.contexts
  ] + [("prefill tokens", n, *one.prefill(n, config.prompt)) for n in config.tokens]  # fmt: skip
  calls = [lambda s=s: one.model_step(*s[2:]) for s in series]
  with progress(config.rounds + 1, "rounds", "Steps of the model") as bar:
    times = bench.interleaved(calls, config.rounds, config.steps, bar.advance)
  return [
    point("model", name, x, us, LINEAR, bucket=bucket)
    for (name, x, _, bucket, _), us in zip(series, times, strict=True)
  ]


def size_points(config, weights):
  """Steps and the scheduler's calls against max_model_len, pool, slots and seats."""
  rows, first = config.rows[-1], config.lengths[0]
  pool = rows * -(-first // config.page_size)
  base = {"length": first, "pages": pool, "requests": 2 * rows, "rows": rows}
  wanted = [("max_model_len", n, base | {"length": n}) for n in config.lengths]
  wanted += [("pages of the pool", n * pool, base | {"pages": n * pool}) for n in config.pools]
  wanted += [("max_requests", n * rows, base | {"requests": n * rows}) for n in config.requests]
  wanted += [
    ("rows and seats", n * rows, base | {
      "rows": n * rows, "requests": 2 * n * rows, "pages": n * pool}) for n in config.seats
  ]  # fmt: skip
  points = []
  if "sizes" in config.only:
    points += step_points(config, weights, wanted[: len(config.lengths) + len(config.pools)])
  if "scheduler" in config.only:
    for prefix in (False, True):
      points += scheduler_points(config, weights, wanted, prefix)
  return points


def built(config, weights, sizes, with_model, prefix=False):
  """The bench for one of `size_points`, decoding; (it, plan, bucket)."""
  rows = sizes["rows"]
  budget = max(rows + 1, config.tokens[-1])
  one = bench.Bench(weights, bench.engine_config(
    weights, budget=budget, buckets=(rows, budget), page_size=config.page_size, prefix=prefix,
    **sizes,
  ), config.cache_dir, with_model, decodes_only=True)  # fmt: skip
  return one, *one.decodes(rows, config.context)


def distinct(config, weights, wanted, **options):
  """Benches of all that is wanted, one for equal sizes."""
  benches = {}
  for _, _, sizes in wanted:
    key = tuple(sizes.items())
    if key not in benches:
      benches[key] = built(config, weights, sizes, **options)
  return [benches[tuple(sizes.items())] for _, _, sizes in wanted]


def step_points(config, weights, wanted):
  """Steps of decodes of one context, which neither max_model_len nor the pool should change."""
  benches = distinct(config, weights, wanted, with_model=True)
  calls = [
    lambda b=b, n=sizes["rows"]: b[0].model_step(b[1], b[2], n)
    for b, (_, _, sizes) in zip(benches, wanted, strict=True)
  ]
  with progress(config.rounds + 1, "rounds", "Steps by sizes") as bar:
    times = bench.interleaved(calls, config.rounds, config.steps, bar.advance)
  return [point("model", name, x, us, FLAT) for (name, x, _), us in zip(wanted, times, strict=True)]


def scheduler_points(config, weights, wanted, prefix):
  """Each call of the scheduler. It may grow with slots and seats, not with lengths or pool."""
  benches = distinct(config, weights, wanted, with_model=False, prefix=prefix)
  calls = [
    lambda b=b, n=sizes["rows"]: b[0].scheduler_step(n)
    for b, (_, _, sizes) in zip(benches, wanted, strict=True)
  ]
  desc = f"Scheduler{', prefix cache' if prefix else ''}"
  with progress(config.rounds + 1, "rounds", desc) as bar:
    times = bench.interleaved(calls, config.rounds, config.steps, bar.advance)
  return [
    point("scheduler", name, x, us[call], FLAT if sizes["rows"] == config.rows[-1]
          and name in ("max_model_len", "pages of the pool") else LINEAR,
          call=call, prefix_cache=prefix)
    for (name, x, sizes), us in zip(wanted, times, strict=True) for call in _CALLS
  ]  # fmt: skip


def point(part, axis, x, us, expected, call="step", **more):
  """A row."""
  return {
    "part": part, "call": call, "axis": axis, "x": x, "us": us, "expected": expected,
    "load_average": provenance.load_average(), **more,
  }  # fmt: skip


def judged(points):
  """One row for every series."""
  series = {}
  for one in points:
    key = one["part"], one["call"], one["axis"], one.get("prefix_cache", False)
    series.setdefault(key, []).append(one)
  rows = []
  for (part, call, axis, prefix), some in series.items():
    if len(some) > 1:
      strict = LINEAR if any(one["expected"] == LINEAR for one in some) else FLAT
      found = fit.judge([one["x"] for one in some], [one["us"] for one in some], strict)
      rows.append({
        "part": part, "call": call, "axis": axis, "prefix_cache": prefix, "expected": strict,
        "first_us": some[0]["us"], "last_us": some[-1]["us"], **found,
      })  # fmt: skip
  return rows
