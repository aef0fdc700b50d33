"""From rounds to medians, paired ratios, bars, and what is said about them."""

import statistics

from experiments.peers.config import CASES, OURS, PEERS, US

# Of a kind of case: what is told of it, its unit, and whether more is better.
METRICS = {
  "decode": (("tokens_per_s", "tokens/s", True),),
  "prefill": (("tokens_per_s", "tokens/s", True),),
  "stall": (
    ("stall_ms", "longest gap, ms", False), ("ttft_s", "TTFT, s", False),
    ("base_gap_ms", "gap before, ms", False),
  ),
  "start": (("cold_s", "cold, s", False), ("warm_s", "warm, s", False)),
  "memory": (("peak_mb", "peak, MB", False),),
}  # fmt: skip
# Least ratio of speeds to the best peer, most of times.
BARS = {
  ("decode_1", "tokens_per_s"): 1.0,
  ("decode_8", "tokens_per_s"): 0.8,
  ("decode_16", "tokens_per_s"): 0.8,
  ("prefill_2048", "tokens_per_s"): 0.75,
  ("prefill_4096", "tokens_per_s"): 0.75,
  ("stall_512", "stall_ms"): 1.25,
  ("stall_512", "ttft_s"): 1.25,
}
COLUMNS = (
  ("model", "model", "{}"),
  ("case", "case", "{}"),
  ("", "unit", "{}"),
  *((peer.title, peer.name, "{:,.4g}") for peer in (OURS, *PEERS.values())),
  ("best peer", "best", "{}"),
  ("ratio", "ratio", "{:.2f}"),
  ("min", "ratio_min", "{:.2f}"),
  ("max", "ratio_max", "{:.2f}"),
  ("bar", "bar", "{}"),
  ("met", "met", "{}"),
  ("of the limit", "of_limit", "{:.0%}"),
)


def summarize(rows):
  """One row for each model, case and metric.

  `ratio` is ours over that of the peer with the best median, the median of the rounds' ratios;
  `ratios` has least, median and most for every peer.
  """
  found = []
  for model in dict.fromkeys(row["model"] for row in rows):
    for case in dict.fromkeys(row["case"] for row in rows):
      rounds = [row["values"] for row in rows if (row["model"], row["case"]) == (model, case)]
      kind = CASES[case].kind if case in CASES else case
      for key, unit, more in METRICS.get(kind, ()):
        if line := _line(rounds, key, more):
          found.append({"model": model, "case": case, "metric": key, "unit": unit, **line})
          found[-1] |= _judged(found[-1], more)
  return found


def _line(rounds, key, more):
  """Medians by engine, and ratios by peer; None if nobody has the figure."""
  names = dict.fromkeys(name for values in rounds for name in values)
  series = {name: [values.get(name, {}).get(key) for values in rounds] for name in names}
  series = {name: got for name, got in series.items() if any(v is not None for v in got)}
  medians = {name: statistics.median(v for v in got if v is not None)
             for name, got in series.items()}  # fmt: skip
  if US not in medians:
    return None
  ratios = {name: _ratios(series[US], got) for name, got in series.items() if name != US}
  ratios = {name: spread for name, spread in ratios.items() if spread}
  line = {**medians, "more_is_better": more, "ratios": ratios, "rounds": len(rounds)}
  limits = [values[US]["of_limit"] for values in rounds if "of_limit" in values.get(US, {})]
  if limits:
    line["of_limit"] = statistics.median(limits)
  if ratios:
    best = (max if more else min)(ratios, key=lambda name: medians[name])
    low, middle, high = ratios[best]
    line |= {"best": best, "ratio": middle, "ratio_min": low, "ratio_max": high}
  return line


def _ratios(ours, theirs):
  """[least, median, most] of ours over theirs, round by round; empty if no round has both."""
  pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b]
  ratios = [a / b for a, b in pairs]
  return [min(ratios), statistics.median(ratios), max(ratios)] if ratios else []


def _judged(line, more):
  bar = BARS.get((line["case"], line["metric"]))
  if bar is None or "ratio" not in line:
    return {}
  met = line["ratio"] >= bar if more else line["ratio"] <= bar
  return {"bar": f"{'>=' if more else '<='} {bar:g}", "met": "yes" if met else "no"}


def findings(summary, rows, skipped):
  """Sentences: bars, limits, agreement, and who was left out."""
  said = []
  for model in dict.fromkeys(row["model"] for row in rows):
    lines = [line for line in summary if line["model"] == model]
    barred = [line for line in lines if "bar" in line]
    if barred:
      missed = [
        f"{line['case']} {line['metric']} {line['ratio']:.2f} ({line['bar']}, {line['best']})"
        for line in barred if line["met"] == "no"
      ]  # fmt: skip
      met = len(barred) - len(missed)
      said.append(f"{model}: {met} of {len(barred)} bars met; missed: {', '.join(missed) or '-'}")
    said += _limit_finding(model, rows)
    said += _agreement_finding(model, rows)
  return said + [f"left out: {name}, {why}" for name, why in skipped.items()]


def _limit_finding(model, rows):
  words = []
  for case in dict.fromkeys(row["case"] for row in rows):
    ours = [row["values"][US] for row in rows if (row["model"], row["case"]) == (model, case)]
    got = [one for one in ours if "of_limit" in one]
    if not got:
      continue
    middle = lambda key, got=got: statistics.median(one[key] for one in got)
    pair = ("gflops", "product_gflops", "GFLOP/s")
    key, best, unit = pair if "gflops" in got[0] else ("gb_s", "read_gb_s", "GB/s")
    share = f"{middle('of_limit'):.0%}"
    words.append(f"{case} {middle(key):.3g} of {middle(best):.3g} {unit} ({share})")
  return [f"{model}, jaxserve against the machine: {'; '.join(words)}"] if words else []


def _agreement_finding(model, rows):
  for row in rows:
    if row["model"] == model and row["case"] == "agreement":
      words = [
        f"{name} {' '.join(map(str, found['first_tokens']))}"
        for name, found in row["values"].items()
        if name != US and "first_tokens" in found
      ]
      of = row["values"][US]["of"]
      return [f"{model}, first tokens equal to jaxserve's, of {of} a prompt: {'; '.join(words)}"]
  return []
