"""Results of `experiments.simulate`: as a table (times in ms), and rounded for a record."""

from experiments import report

COLUMNS = (
  ("policy", "policy", "{}"),
  ("budget", "budget", "{}"),
  ("cap", "long_prefill_token_threshold", "{}"),
  ("TTFT p50", "p50_ttft_ms", "{:.0f}"),
  ("TTFT p99", "p99_ttft_ms", "{:.0f}"),
  ("ITL p50", "p50_itl_ms", "{:.1f}"),
  ("ITL p99", "p99_itl_ms", "{:.1f}"),
  ("ITL max", "max_itl_ms", "{:.1f}"),
  ("out tok/s", "output_throughput", "{:.0f}"),
  ("good req/s", "request_goodput", "{:.2f}"),
  ("of req/s", "request_throughput", "{:.2f}"),
  ("busy", "utilization", "{:.0%}"),
  ("padding", "padding_share", "{:.1%}"),
  ("preempted", "preemptions", "{}"),
  ("steps", "steps", "{}"),
  ("capacity", "capacity_per_s", "{:.2f}"),
)


def render(rows):
  """Right-aligned columns; those that no row has are left out."""
  return report.text_table(rows, COLUMNS)


def rounded(row):
  """Only the columns of the table, four digits behind the point."""
  keep = {key for _, key, _ in COLUMNS}
  return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k in keep}
