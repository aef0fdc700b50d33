"""`report.html`: one page that shows what chunked prefill did, with nothing to load."""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve import cost, metrics, sched
from jaxserve.replay import charts, svg
from jaxserve.replay.records import RunRecord, run_result

STYLE = """
:root { color-scheme: light dark;
  --page: #fff; --ink: #1c1e21; --soft: #5c6370; --grid: #e6e8ec; --rule: #d5d9df;
  --decode: #2f6fb3; --prefill: #e8892b; --padding: #d9dce2; --waiting: #c3c8d0;
  --decoding: #bcd6ee; --band: #e8892b1c; --bad: #c62f3c; }
@media (prefers-color-scheme: dark) { :root {
  --page: #15181c; --ink: #e7e9ec; --soft: #a0a7b2; --grid: #2a2f36; --rule: #3a4049;
  --decode: #6aa9e9; --prefill: #f0a04b; --padding: #3a4049; --waiting: #59606b;
  --decoding: #27435f; --band: #f0a04b20; --bad: #ff6b76; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1120px; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p { margin: .5rem 0; max-width: 50rem; } .soft, footer { color: var(--soft); font-size: .9rem; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem 1.6rem .25rem 0; text-align: right; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; min-width: 15rem; }
thead th { border-bottom: 1px solid var(--rule); }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin: 0 .35em 0 1.1em; }
.key:first-child { margin-left: 0; }
svg { width: 100%; height: auto; display: block; margin: .4rem 0; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .tick, svg .label { fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .mark, svg .peak, svg .long { font-weight: 600; }
.grid { stroke: var(--grid); } .budget { stroke: var(--ink); stroke-dasharray: 6 4; }
.arrival { stroke: var(--prefill); stroke-width: 1.5; } .band { fill: var(--band); }
.decode, .token { fill: var(--decode); } .prefill, .life-prefill { fill: var(--prefill); }
.padding { fill: var(--padding); } .life-waiting { fill: var(--waiting); }
.life-decode { fill: var(--decoding); } .token { pointer-events: none; }
.life-prefill { stroke: var(--page); stroke-width: .6; }
svg .preempted { fill: var(--bad); font-weight: 700; }
.hover { fill: transparent; } .hover:hover { fill: var(--ink); fill-opacity: .12; }
.run path { fill: none; stroke-width: 1.2; stroke-opacity: .55; }
"""
# Of the runs, on light and on dark paper; told apart by the colour-blind too (after Okabe and Ito).
RUN_COLORS = (
  ("#0b8a6a", "#35c79f"), ("#b8336a", "#f0729f"), ("#0072b2", "#56b4e9"), ("#b35900", "#f0a04b"),
  ("#6b4fa0", "#b7a0e8"), ("#8a7a00", "#e8d84a"), ("#444b55", "#a0a7b2"), ("#7a3b1d", "#d19a7c"),
)  # fmt: skip

_KEY = (
  ("--decode", "a decoded token"),
  ("--decoding", "waiting for the next token"),
  ("--prefill", "a prefill chunk"),
  ("--padding", "padding to the bucket"),
  ("--waiting", "not scheduled"),
)


def _ms(value: float) -> str:
  return f"{value:,.0f} ms" if value >= 100 else f"{value:,.1f} ms"


_DRAFTS: Sequence[tuple[str, str, Callable[[Any], str]]] = (
  ("Draft tokens verified", "draft_tokens", "{:,}".format),
  ("Accepted of them", "acceptance_rate", "{:.1%}".format),
  ("Accepted, by place in the draft", "accepted_by_position", lambda x: ", ".join(map(str, x))),
  ("Tokens of a stream per step", "decode_tokens_per_step", "{:.2f}".format),
)
_ROWS: Sequence[tuple[str, str, Callable[[Any], str]]] = (
  ("TTFT, median", "p50_ttft_ms", _ms),
  ("TTFT, p99", "p99_ttft_ms", _ms),
  ("TTFT, worst", "max_ttft_ms", _ms),
  ("TTFT of the long prompt", "long_prompt_ttft_ms", _ms),
  ("ITL, median", "p50_itl_ms", _ms),
  ("ITL, p99", "p99_itl_ms", _ms),
  ("ITL, worst", "max_itl_ms", _ms),
  ("Longest stall of a stream", "longest_stall_ms", _ms),
  ("Output tokens per second", "output_throughput", "{:,.1f}".format),
  ("Steps", "steps", "{:,}".format),
  ("Padding, of tokens computed", "padding_fraction", "{:.1%}".format),
  ("Preemptions", "preemptions", "{:,}".format),
  ("Prompt tokens found in the prefix cache", "prefix_hit_tokens", "{:,}".format),
  ("Share of the prompt tokens", "prefix_hit_rate", "{:.1%}".format),
  ("Found by preempted requests", "prefix_resumed_tokens", "{:,}".format),
  ("Cached pages evicted", "prefix_evictions", "{:,}".format),
)


def render_report(title: str, runs: Sequence[RunRecord], summary: Mapping[str, Any]) -> str:
  """The whole page.

  Args:
    title: its heading.
    runs: the same workload under different settings, at least one; the first is the one advocated.
    summary: the document of `result.json`. Used where present: model, hardware, retraces,
      tokens_equal, near_ties.

  Returns:
    HTML with inline drawings; it follows the reader's light or dark setting.
  """
  horizon = max(run.end_s - run.start_s for run in runs)
  results = [run_result(run) for run in runs]
  policies = len({run.policy for run in runs})
  body = (
    svg.element("h1", html.escape(title)),
    _paragraph(_facts(summary), "soft"),
    _paragraph(_explanation(runs, results)),
    svg.element("h2", "Side by side"),
    _table(runs, results, summary),
    _stream_section(runs, horizon),
    *(_run_section(i, run, horizon, policies) for i, run in enumerate(runs)),
    svg.element("h2", "The same budget on a large accelerator"),
    _paragraph(cost.describe(runs[0].budget)),
    _paragraph("By the arithmetic of jaxserve.cost, not measured here.", "soft"),
  )
  head = (
    '<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
    f"<title>{html.escape(title)}</title><style>{STYLE}{_run_style(len(runs))}</style>"
  )
  page = "\n".join(body)
  return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{page}\n</body></html>\n'


def _paragraph(words: str, class_: str = "") -> str:
  return svg.element("p", html.escape(words), class_=class_)


def _key(entries: Sequence[tuple[str, str]]) -> str:
  marks = (
    svg.element("span", class_="key", style=f"background: var({colour})") + html.escape(words)
    for colour, words in entries
  )
  return svg.element("div", *marks, class_="soft")


def _facts(summary: Mapping[str, Any]) -> str:
  """What was run, and whether the outputs agree."""
  parts = [str(summary[key]) for key in ("model", "hardware") if summary.get(key)]
  if "tokens_equal" in summary:
    ties = summary.get("near_ties", 0)
    equal = "the same outputs in all runs" if summary["tokens_equal"] else "outputs differ"
    parts.append(equal + (f" up to near ties ({ties})" if ties else ""))
  return " · ".join(parts)


def _run_style(count: int) -> str:
  """The colours of `count` runs; after eight they begin again."""
  light, dark, rules = [], [], []
  for i in range(count):
    colors = RUN_COLORS[i % len(RUN_COLORS)]
    light.append(f"--run-{i}: {colors[0]};")
    dark.append(f"--run-{i}: {colors[1]};")
    rules.append(
      f".run-{i} path {{ stroke: var(--run-{i}); }} "
      f".run-{i} circle, svg .run-{i} text {{ fill: var(--run-{i}); }}"
    )
  return (
    f":root {{ {' '.join(light)} }}\n@media (prefers-color-scheme: dark) "
    f"{{ :root {{ {' '.join(dark)} }} }}\n" + "\n".join(rules)
  )


def _policies_explained(runs: Sequence[RunRecord], results: Sequence[Mapping[str, Any]]) -> str:
  """What to see when several policies ran on one load."""
  pairs = zip(runs, results, strict=True)
  stalls = {run.name: result["longest_stall_ms"] or 0.0 for run, result in pairs}
  best, worst = min(stalls, key=stalls.__getitem__), max(stalls, key=stalls.__getitem__)
  return (
    "The same requests arrive under every policy; what differs is who waits. A policy that puts "
    "prompts first freezes every stream until the whole train of prompts "
    "is computed, and its own first tokens come soonest. A stall-free one lets each step carry "
    "all decodes and fills what is left of the budget with a chunk of a prompt. The longest stall "
    f"of a stream is {_ms(stalls[best])} under “{best}” and {_ms(stalls[worst])} under “{worst}”."
  )


def _in_words(policy: str) -> str:
  """What a policy does; nothing for one that this version does not have."""
  known = sched.POLICIES.get(policy)
  return f" “{policy}” {known.words}" if known and known.words else ""


def _explanation(runs: Sequence[RunRecord], results: Sequence[Mapping[str, Any]]) -> str:
  """One paragraph for somebody who has never heard of chunked prefill."""
  if len({run.policy for run in runs}) > 1:
    return _policies_explained(runs, results)
  prompt, stalls = runs[0].long_prompt, [result["longest_stall_ms"] for result in results]
  size = f"a prompt of {prompt.num_prompt:,} tokens" if prompt else "a long prompt"
  words = (
    f"While other requests are decoding, {size} arrives. A step computes at most its budget of "
  )
  rule = _in_words(runs[0].policy)
  if runs[0].policy == "vllm_v1" or not rule:
    words += (
      f"tokens, and decodes draw from it first: at a budget of {runs[0].budget:,} the prompt gets "
      "what they leave, one chunk a step, and everybody else goes on. The work is the same; the "
      "wait is cut into pieces."
    )
  else:
    words += f"{runs[0].budget:,} tokens.{rule}"
  if len(runs) < 2 or not all(stalls[:2]):
    return words
  ratio = stalls[1] / stalls[0]
  words += (
    f" The longest stall of a stream is {_ms(stalls[0])} in “{runs[0].name}” and {_ms(stalls[1])} "
    f"in “{runs[1].name}”" + (f", {ratio:.1f} times longer." if ratio > 1.05 else ".")
  )
  waits = [result["long_prompt_ttft_ms"] for result in results]
  if all(waits[:2]):
    words += f" The long prompt's own first token takes {_ms(waits[0])} and {_ms(waits[1])}."
  return words


def _table(
  runs: Sequence[RunRecord], results: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> str:
  """The numbers of all runs; a dash where there was nothing to measure."""

  def row(tag: str, cells: Sequence[str]) -> str:
    return svg.element("tr", *(svg.element(tag, html.escape(cell)) for cell in cells))

  drafted = any("draft_tokens" in r for r in results)
  body = [
    row("td", [label, *("–" if r.get(key) is None else show(r[key]) for r in results)])
    for label, key, show in (*_ROWS, *(_DRAFTS if drafted else ()))
  ]
  if "retraces" in summary:
    retraces = [f"{summary['retraces']}"] * len(results)
    body.append(row("td", ["Compilations after start-up", *retraces]))
  names = row("th", ["", *(run.name for run in runs)])
  return svg.element(
    "table", svg.element("thead", names), svg.element("tbody", *body), class_="numbers"
  )


def _victim(runs: Sequence[RunRecord]) -> str | None:
  """A stream that stalled about longest in any run; of several, the one stalled most midway."""
  times = [r.times for run in runs for r in run.requests if not (r.is_long_prompt or r.is_warmup)]
  stalls = [(stall, one) for one in times if (stall := metrics.longest_stall([one]))]
  worst = max((stall.seconds for stall, _ in stalls), default=0.0)

  def tokens_around(stall: metrics.Stall, one: metrics.RequestTimes) -> int:
    before = sum(at <= stall.start_s for at in one.token_times_s)
    return min(before, one.num_output - before)

  victims = [pair for pair in stalls if pair[0].seconds > 0.9 * worst]
  return max(victims, key=lambda pair: tokens_around(*pair))[0].request_id if victims else None


def _stream_section(runs: Sequence[RunRecord], horizon: float) -> str:
  """The gaps of the stream that suffered most."""
  stream = _victim(runs)
  if stream is None:
    return ""
  key = [(f"--run-{i}", run.name) for i, run in enumerate(runs)]
  words = f"One stream, {stream}: every dot is a token, and its height the wait for it."
  return "".join((
    svg.element("h2", "What one reader sees"),
    _paragraph(words, "soft"),
    _key(key),
    charts.itl_chart(runs, stream, horizon),
  ))  # fmt: skip


def _run_section(index: int, run: RunRecord, horizon: float, policies: int) -> str:
  """Steps and requests of one run, and what its policy does where there are several."""
  mark = svg.element("span", class_="key", style=f"background: var(--run-{index})")
  lost = (("--bad", "× preempted"),) if any(step.preempted for step in run.steps) else ()
  return "".join((
    svg.element("h2", mark, html.escape(run.name)),
    _paragraph(_in_words(run.policy).strip(), "soft") if policies > 1 else "",
    _key((*_KEY, *lost)),
    charts.run_chart(run, horizon),
  ))  # fmt: skip
