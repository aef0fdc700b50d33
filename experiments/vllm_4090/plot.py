"""Ours against measured: a table of errors, and the distributions."""

from experiments import report
from experiments.vllm_4090.run import QUANTILES

FIGURES = (
  ("makespan_s", "makespan s", "{:.1f}"),
  ("p50_ttft_s", "TTFT p50 s", "{:.1f}"),
  ("p99_ttft_s", "TTFT p99 s", "{:.1f}"),
  ("p50_tpot_ms", "TPOT p50 ms", "{:.1f}"),
  ("p99_tpot_ms", "TPOT p99 ms", "{:.1f}"),
  ("p50_e2e_s", "E2E p50 s", "{:.1f}"),
)
TARGET = 0.10
COLUMNS = (
  ("", "name", "{}"),
  *(
    column
    for key, title, form in FIGURES
    for column in ((title, key, form), ("error", f"error_{key}", "{:+.1%}"))
  ),
  ("preempted", "preemptions", "{}"),
  ("computed again", "computed_again", "{:,}"),
  ("steps", "steps", "{:,}"),
)  # fmt: skip
MUST = ("makespan_s", "p50_ttft_s", "p99_ttft_s", "p50_tpot_ms", "p99_tpot_ms")


def page(config, rows):
  truth, ours = rows[0], rows[1]
  worst = max(MUST, key=lambda key: abs(ours[f"error_{key}"]))
  error, title = ours[f"error_{worst}"], dict((key, words) for key, words, _ in FIGURES)[worst]
  late = ours["makespan_s"] - truth["makespan_s"]
  return report.Page(
    title="A measured vLLM run, simulated",
    question="Given the times of its kernels and nothing fitted, does the simulator predict a run "
    "of vLLM on a real GPU?",
    setup="vLLM 0.19.0, Llama-3.1-8B in bfloat16 on one RTX 4090, 300 requests within 29 s: "
    f"{config.pages:,} pages of {config.page_size}, budget {config.budget:,}, {config.seats} "
    "seats; step times by linear interpolation in the recorded profile of its kernels",
    findings=[
      f"largest error of makespan, TTFT and TPOT (medians and p99): {error:+.1%}, of {title}; "
      f"the target is {TARGET:.0%}: {'met' if abs(error) <= TARGET else 'missed'}",
      f"the simulated run ends {late:+.1f} s later than the measured one; it computes "
      f"{ours['computed_again']:,} tokens a second time after {ours['preemptions']} preemptions",
    ],
    columns=COLUMNS,
    rows=rows,
    charts=[
      cdf("ttft", "ttft_s", "time to the first token (s)", rows),
      cdf("tpot", "tpot_ms", "mean time per output token of a request (ms)", rows),
      cdf("e2e", "e2e_s", "time to the last token (s)", rows),
    ],
  )  # fmt: skip


def cdf(name, key, label, rows):
  shares = [q / 100 for q in QUANTILES]
  return report.Chart(
    name=name, title=f"{label[0].upper()}{label[1:label.rindex(' (')]}, measured and simulated",
    x_label=label, y_label="share of the requests",
    content=[
      report.Line(label=row["name"], x=row[f"curve_{key}"], y=shares, markers=False)
      for row in rows[:2]
    ],
    caption="Distribution over the 300 requests.",
  )  # fmt: skip
