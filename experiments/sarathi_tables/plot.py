"""What we get beside what was published, and which orderings hold."""

from experiments import report
from experiments.sarathi_tables import published

COLUMNS = (
  ("part", "part", "{}"),
  ("model", "model", "{}"),
  ("GPUs", "gpus", "{}"),
  ("load", "load", "{}"),
  ("SLO", "slo", "{}"),
  ("variant", "variant", "{}"),
  ("budget", "budget", "{:,}"),
  ("TTFT p50 s", "p50_ttft_s", "{:.2f}"),
  ("published", "published_ttft_s", "{:.2f}"),
  ("TBT p99 s", "p99_tbt_s", "{:.2f}"),
  ("published ", "published_tbt_s", "{:.2f}"),
  ("TTFT ms", "ttft_ms", "{:,.0f}"),
  ("TPOT ms", "tpot_ms", "{:.1f}"),
  ("ITL p99 ms", "p99_itl_ms", "{:.0f}"),
  ("output tok/s", "output_throughput", "{:,.0f}"),
  ("capacity req/s", "capacity_per_s", "{:.2f}"),
)
NAMES = ("hybrid only", "chunking only", "both")


def page(config, rows):
  part = lambda name: [row for row in rows if row["part"] == name]
  charts = [table_4(part("table 4"), "ttft"), table_4(part("table 4"), "tbt")]
  charts += [mixed(part("mixed"), key) for key in ("ttft_ms", "p99_itl_ms")]
  findings = [*table_findings(part("table 4")), *mixed_findings(part("mixed"))]
  if part("capacity"):
    charts.append(gains(part("capacity")))
    findings += capacity_findings(part("capacity"))
  return report.Page(
    title="The shape of published results",
    question="Do the policies, run by the engine's scheduler in virtual time, give the orderings "
    "and magnitudes that Sarathi-Serve and a comparison of SGLang's policies published?",
    setup="Yi-34B on two A100 by a fit to published iteration times; Mistral-7B on one A100 and "
    "Qwen3-32B-FP8 on H200 by the roofline of jaxserve.cost, nothing fitted; loads generated with "
    "the published medians and 90th percentiles",
    findings=findings,
    columns=COLUMNS,
    rows=rows,
    charts=charts,
  )


def by_variant(rows, load, budget):
  """The three variants, those that cut prompts at one budget."""
  return {
    row["variant"]: row
    for row in rows
    if row["load"] == load and (row["variant"] == "hybrid only" or row["budget"] == budget)
  }


def cases_of(rows):
  """Every (load, budget of the variants that cut prompts)."""
  return list(dict.fromkeys(
    (row["load"], row["budget"]) for row in rows if row["variant"] != "hybrid only"
  ))  # fmt: skip


def table_4_holds(rows, load, budget):
  """Chunking alone the worst TTFT, hybrid alone the worst TBT; both together near the best."""
  of = by_variant(rows, load, budget)
  ttft = {name: of[name]["p50_ttft_s"] for name in NAMES}
  tbt = {name: of[name]["p99_tbt_s"] for name in NAMES}
  return {
    "chunking alone has the worst TTFT": max(ttft, key=ttft.get) == "chunking only",
    "hybrid batches alone have the worst TBT": max(tbt, key=tbt.get) == "hybrid only",
    "both together have the best TBT": min(tbt, key=tbt.get) == "both",
    "both together have a TTFT between the two": (
      ttft["hybrid only"] <= ttft["both"] <= ttft["chunking only"]
    ),
  }


def table_findings(rows):
  found = []
  for load, budget in cases_of(rows):
    holds = table_4_holds(rows, load, budget)
    no = [words for words, ok in holds.items() if not ok]
    yes = "the whole ordering holds" if not no else f"does not hold: {'; '.join(no)}"
    off = [
      f"{name} TTFT {row['p50_ttft_s'] / row['published_ttft_s'] - 1:+.0%}, TBT "
      f"{row['p99_tbt_s'] / row['published_tbt_s'] - 1:+.0%}"
      for name, row in by_variant(rows, load, budget).items()
    ]
    found.append(f"Table 4, {load}, budget {budget:,}: {yes}; against the published numbers: "
                 f"{'; '.join(off)}")  # fmt: skip
  return found


def mixed_findings(rows):
  found = []
  for row in rows:
    expected = published.MIXED[row["gpus"], row["variant"]]
    off = ", ".join(f"{key} {row[key] / value - 1:+.0%}" for key, value in expected.items())
    found.append(f"Qwen3-32B on {row['gpus']} H200, {row['variant']}: {off} of the published")
  return found


def gain_rows(rows, baseline):
  of = {(r["model"], r["load"], r["slo"], r["variant"]): r["capacity_per_s"] for r in rows}
  keys = dict.fromkeys((r["model"], r["load"], r["slo"]) for r in rows)
  ratio = lambda key: of[*key, "sarathi"] / of[*key, baseline] if of[*key, baseline] else None
  return {key: ratio(key) for key in keys}


def capacity_findings(rows):
  found = []
  for baseline in ("orca", "vllm"):
    gain = {key: value for key, value in gain_rows(rows, baseline).items() if value}
    more = sum(value > 1 for value in gain.values())
    found.append(
      f"capacity of Sarathi-Serve over {baseline}: more in {more} of {len(gain)} cases, "
      f"{min(gain.values()):.2f} to {max(gain.values()):.2f} times"
    )
  lost = [key for key, value in gain_rows(rows, "vllm").items() if value is None]
  if lost:
    found.append(f"vllm keeps the objective at no rate: {', '.join('/'.join(key) for key in lost)}")
  return found


def table_4(rows, what):
  key, words = {
    "ttft": ("p50_ttft_s", "median time to first token (s)"),
    "tbt": ("p99_tbt_s", "p99 gap between tokens (s)"),
  }[what]
  series = {}
  for load, budget in cases_of(rows):
    of = by_variant(rows, load, budget)
    series[f"{load}, budget {budget:,}"] = [of[name][key] for name in NAMES]
    series[f"{load}, published"] = [of[name][f"published_{what}_s"] for name in NAMES]
  order = sorted(series, key=lambda label: (label.split(",")[0] != "chat", "published" in label))
  return report.Chart(
    name=f"table_4_{what}", title=f"Sarathi-Serve, Table 4: {words[:-4]}", x_label="what is on",
    y_label=words, log_y=True,
    content=report.Bars(
      groups=NAMES, series={label: series[label] for label in order}, format="{:.2f}"
    ),
    caption="Yi-34B on two A100, 128 requests; means over the seeds. The budget is that of the "
    "variants that cut prompts.",
  )  # fmt: skip


def mixed(rows, key):
  words = {"ttft_ms": "mean time to first token (ms)", "p99_itl_ms": "p99 gap between tokens (ms)"}
  variants = ("prefill first", "mixed")
  of = {(row["gpus"], row["variant"]): row[key] for row in rows}
  keys = [(gpus, name) for gpus in dict.fromkeys(row["gpus"] for row in rows) for name in variants]
  groups = [f"{name}, {gpus} GPU" for gpus, name in keys]
  return report.Chart(
    name=f"mixed_{key}", title=f"Qwen3-32B-FP8 on H200, 128 under way: {words[key][:-5]}",
    x_label="policy, GPUs", y_label=words[key],
    content=report.Bars(
      groups=groups,
      series={
        "simulated": [of[k] for k in keys], "published": [published.MIXED[k][key] for k in keys],
      },
      format="{:,.0f}",
    ),
    caption="A synchronized closed loop. Prefill-first hides its stall from p99: every request "
    "meets it once in 1,023 gaps.",
  )  # fmt: skip


def gains(rows):
  keys = list(gain_rows(rows, "orca"))
  return report.Chart(
    name="capacity", title="Capacity of Sarathi-Serve over that of the others",
    x_label="model, load, objective", y_label="capacity, ratio",
    content=report.Bars(
      groups=["\n".join(key) for key in keys],
      series={
        "over Orca, simulated": [gain_rows(rows, "orca")[key] for key in keys],
        "over Orca, published": [published.CAPACITY_GAIN.get(key) for key in keys],
        "over vLLM V0, simulated": [gain_rows(rows, "vllm")[key] for key in keys],
      },
      format="{:.2g}",
    ),
    levels=[(1.0, "")],
    caption="A bar without height and a dash: the other keeps the objective at no rate. Published "
    "ratios were read from figures by others.",
  )  # fmt: skip
