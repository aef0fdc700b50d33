"""Every reachable state of tiny schedulers: `python -m experiments.exhaustive`.

Searches breadth first, for every policy, all orders of arrivals, steps, stops and aborts; checks
all laws in every state and that every state drains. Prints the number of states. Writes a drawing
and report.html to runs/exhaustive, or with --record to results/. Exit code 1 if a law is broken.
"""

from absl import app, flags

from experiments import case, flow
from experiments.exhaustive import config, plot, run

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_POLICIES = flags.DEFINE_list("policies", list(_DEFAULT.policies), "Of `sched.POLICIES`.")
_ROWS = flags.DEFINE_integer("rows", _DEFAULT.rows, "Requests at once, and seats.")
_PAGES = flags.DEFINE_list("pages", list(map(str, _DEFAULT.pages)), "Of the pool: 2, 3.")
_BUDGETS = flags.DEFINE_list("budgets", list(map(str, _DEFAULT.budgets)), "1 to 4.")
_VARIANTS = flags.DEFINE_bool("variants", _DEFAULT.variants, "Other options too.")
_PREFIX = flags.DEFINE_bool("prefix_cache", _DEFAULT.prefix_cache, "With a prefix cache too.")
_MOST = flags.DEFINE_integer("most_states", _DEFAULT.most_states, "Of a search.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "Folder of the results. Default: runs/exhaustive.")
_RECORD = flags.DEFINE_bool("record", False, "Keep the results in the experiment's results/.")


def main(argv):
  chosen = lambda: config.Config(
    policies=tuple(_POLICIES.value), rows=_ROWS.value, pages=case.numbers("pages", _PAGES.value),
    budgets=case.numbers("budgets", _BUDGETS.value), variants=_VARIANTS.value,
    prefix_cache=_PREFIX.value, most_states=_MOST.value,
  )  # fmt: skip
  broken = []

  def page(config, rows):
    broken.extend(row for row in rows if row["violation"])
    return plot.page(config, rows)

  code = flow.execute(__file__, argv, chosen, run.run, page, out=_OUT.value, record=_RECORD.value)
  return code or int(bool(broken))


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("exhaustive", FLAGS, flags.Error))
