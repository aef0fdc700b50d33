"""The hit rate against the pool, and the time to the first token of both turns."""

import pathlib

from experiments import report

COLUMNS = (
  ("", "name", "{}"),
  ("found", "found", "{}"),
  ("evictions", "evictions", "{:,}"),
  ("first turn's TTFT ms", "first_ttft_ms", "{:,.1f}"),
  ("second turn's TTFT ms", "second_ttft_ms", "{:,.1f}"),
)


def named(row):
  if "pool" in row:
    pool = "unlimited" if row["unlimited"] else f"{row['pages']:,} pages"
    return row | {"name": f"trace, {pool}", "found": f"{row['hit_rate']:.2%}"}
  found = f"{row['second_cached_tokens']:,.0f} of {row['second_prompt_tokens']:,.0f} tokens"
  return row | {"name": f"chat, {row['chat']}", "found": found}


def page(config, rows):
  trace = [row for row in rows if "pool" in row]
  chat = {row["chat"]: row for row in rows if "chat" in row}
  findings, charts = [], []
  if trace:
    whole = trace[-1]
    findings.append(
      f"{whole['hit_rate']:.2%} of {whole['queried_tokens']:,} prompt tokens are found again if "
      f"nothing is evicted, {trace[0]['hit_rate']:.2%} in a pool of {trace[0]['pages']:,} pages"
    )
    charts.append(rates(config, trace))
  if chat:
    with_cache, without = chat["cached"], chat["computed"]
    ratio = without["second_ttft_ms"] / with_cache["second_ttft_ms"]
    same = "the same" if with_cache["texts"] == without["texts"] else "OTHER"
    findings.append(
      f"the second turn's first token comes after {with_cache['second_ttft_ms']:,.0f} ms instead "
      f"of {without['second_ttft_ms']:,.0f} ms, {ratio:.1f} times sooner, with {same} outputs"
    )
    charts.append(turns(config, with_cache, without))
  return report.Page(
    title="What a prefix cache finds again",
    question="How much of what is asked was asked before, and what does a second turn cost?",
    setup=setup(config),
    findings=findings,
    columns=COLUMNS,
    rows=[named(row) for row in rows],
    charts=charts,
  )


def setup(config):
  parts = []
  if config.trace:
    name = pathlib.Path(config.trace).name
    parts.append(f"trace {name} in order of arrival, pages of {config.page_size} tokens")
  if config.model:
    parts.append(
      f"{config.chats} chats with {config.model} on the engine: {config.first:,} tokens, then "
      f"{config.second} more after {config.outputs} outputs, budget {config.budget}"
    )
  return "; ".join(parts)


def rates(config, trace):
  pages = [row["pages"] for row in trace]
  return report.Chart(
    name="hit_rate", title="What is found again, by the size of the pool", log_x=True, y_from=0,
    x_label=f"pool (pages of {config.page_size} tokens)", y_label="prompt tokens found (%)",
    content=[
      report.Line(label="by the scheduler", x=pages, y=[100 * row["hit_rate"] for row in trace])
    ],
    ticks=pages,
    caption="Requests one after the other, in order of arrival; the last pool holds all of them.",
  )  # fmt: skip


def turns(config, with_cache, without):
  del config
  return report.Chart(
    name="two_turns", title="Two turns of a chat", x_label="turn",
    y_label="time to first token (ms)",
    content=report.Bars(
      groups=("first", "second"),
      series={
        "computed whole": [without["first_ttft_ms"], without["second_ttft_ms"]],
        "with the cache": [with_cache["first_ttft_ms"], with_cache["second_ttft_ms"]],
      },
      format="{:,.0f}",
    ),
    caption="The second prompt is the first with its outputs and some tokens more.",
  )  # fmt: skip
