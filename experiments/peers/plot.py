"""The page and its charts: how many times as fast as each peer."""

from experiments import report
from experiments.peers import table
from experiments.peers.config import PEERS


def page(config, summary, findings):
  """All there is to say."""
  models = dict.fromkeys(line["model"] for line in summary if line["ratios"])
  return report.Page(
    title="Beside other engines, on a CPU",
    question="How does jaxserve compare with the engines that people would pick instead?",
    setup=f"bfloat16, the same weights, prompts and token counts; {config.rounds} interleaved "
    "rounds; medians, and ratios jaxserve / best peer by round. Speeds: more is better; times "
    "and memory: less.",
    findings=findings, columns=table.COLUMNS, rows=summary,
    charts=[chart(model, summary) for model in models],
  )  # fmt: skip


def chart(model, summary):
  """Bars above 1 where jaxserve is ahead."""
  lines = [line for line in summary if line["model"] == model and line["ratios"]]
  names = [name for name in PEERS if any(name in line["ratios"] for line in lines)]
  series = {
    PEERS[name].title: [_times_as_good(line, name) for line in lines] for name in names
  }  # fmt: skip
  return report.Chart(
    name=f"peers_{model.replace('-', '_')}", title=f"jaxserve against each peer, {model}",
    x_label="", y_label="times as fast, or as small, as the peer",
    content=report.Bars(groups=[_name(line) for line in lines], series=series, format=""),
    log_y=True,
    levels=((1.0, "the same"),),
    caption="Medians of the rounds' ratios. Times and memory are turned over, so above 1 jaxserve "
    "is ahead everywhere.",
  )  # fmt: skip


def _name(line):
  short = {"stall_ms": "gap", "ttft_s": "TTFT", "base_gap_ms": "before", "cold_s": "cold",
           "warm_s": "warm"}  # fmt: skip
  return f"{line['case']} {short.get(line['metric'], '')}".strip()


def _times_as_good(line, name):
  if name not in line["ratios"]:
    return None
  middle = line["ratios"][name][1]
  return middle if line["more_is_better"] else 1 / middle
