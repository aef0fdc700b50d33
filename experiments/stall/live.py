"""The same question to the real engine: `python -m jaxserve.main`, once for every budget.

Its load is scaled to the machine: ten chats and one prompt of some thousand tokens, sent open loop.
Each process runs the load under its budget and again unchunked, and leaves a report of its own.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys

from experiments import provenance, report

COLUMNS = (
  ("", "name", "{}"),
  ("longest stall ms", "longest_stall_ms", "{:,.0f}"),
  ("ITL p50 ms", "p50_itl_ms", "{:.1f}"),
  ("ITL p99 ms", "p99_itl_ms", "{:.1f}"),
  ("TTFT p50 ms", "p50_ttft_ms", "{:,.0f}"),
  ("prompt's TTFT ms", "long_prompt_ttft_ms", "{:,.0f}"),
  ("output tok/s", "output_throughput", "{:,.0f}"),
  ("same tokens", "tokens_equal", "{}"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """budgets: of the chunked runs; model and flags: of `jaxserve.main`."""

  budgets: tuple[int, ...] = (128, 256, 512, 1024)
  model: str = "smollm2-135m"
  flags: tuple[str, ...] = ()
  out: str = "runs/stall_engine"


def run(config, store):
  fixed = {"model": config.model, "flags": config.flags, "commit": provenance.collect()["commit"]}
  settings = [{"engine_budget": budget} for budget in config.budgets]
  found = store.measure("Running the engine", fixed, settings, lambda s: measure(config, s))
  whole = [row["unchunked"] | {"name": f"unchunked ({row['engine_budget']:,})"} for row in found]
  return [row["chunked"] | {"name": f"{row['engine_budget']:,}"} for row in found] + whole


def measure(config, setting):
  budget = setting["engine_budget"]
  out = pathlib.Path(config.out) / f"budget_{budget}"
  command = [
    sys.executable, "-m", "jaxserve.main", f"--budget={budget}", f"--model={config.model}",
    f"--out={out}", *config.flags,
  ]  # fmt: skip
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
  if done.returncode:
    raise ValueError(f"jaxserve.main ended with exit code {done.returncode}; see above")
  document = json.loads(done.stdout.splitlines()[-1])
  shared = {"tokens_equal": document["tokens_equal"]}
  chunked, whole = (one | shared for one in document["runs"])
  return {"chunked": chunked, "unchunked": whole, "hardware": document["hardware"]}


def page(config, rows):
  half = len(rows) // 2
  chunked, whole = rows[:half], rows[half:]
  budgets = [row["budget"] for row in chunked]
  series = {
    "longest_stall_ms": "longest stall", "long_prompt_ttft_ms": "the prompt's time to first token"
  }  # fmt: skip
  lines = [
    report.Line(label=f"{words}, {kind}", x=budgets, y=[row[key] for row in part])
    for key, words in series.items()
    for kind, part in (("chunked", chunked), ("unchunked", whole))
  ]
  best = min(chunked, key=lambda row: row["longest_stall_ms"])
  worst = max(row["longest_stall_ms"] for row in whole)
  return report.Page(
    title="One long prompt among streams, on the engine",
    question="What does chunking do on this machine?",
    setup=f"{config.model}, ten chats and one long prompt, as in `python -m jaxserve.main`",
    findings=[
      f"longest stall {best['longest_stall_ms']:,.0f} ms at a budget of {best['budget']:,}, up to "
      f"{worst:,.0f} ms unchunked"
    ],
    columns=COLUMNS, rows=rows,
    charts=[
      report.Chart(
        name="engine", title="The stall and the prompt's wait, measured", log_x=True, log_y=True,
        x_label="token budget of a step (tokens)", y_label="time (ms)", content=lines,
        ticks=budgets,
        caption="Unchunked runs do not depend on the budget; their spread is that of the machine.",
      )
    ],
  )  # fmt: skip
