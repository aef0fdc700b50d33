"""What a prefix cache finds again: `python -m experiments.prefix_reuse --trace FILE`.

Runs a Mooncake trace through the scheduler alone, in order of arrival, and two-turn chats on the
real engine. Writes drawings and report.html to runs/prefix_reuse, or with --record to results/.
"""

from absl import app, flags

from experiments import case, flow
from experiments.prefix_reuse import config, plot, run

FLAGS = flags.FLAGS
_DEFAULT = config.Config()
_TRACE = flags.DEFINE_string("trace", None, "Trace of Mooncake; none: the chats only.")
_PAGE_SIZE = flags.DEFINE_integer("page_size", _DEFAULT.page_size, "Of the trace.", lower_bound=1)
_POOLS = flags.DEFINE_list("pools", list(map(str, _DEFAULT.pools)), "Pages; 0: unlimited.")
_MODEL = flags.DEFINE_string("model", _DEFAULT.model, "Of the chats; '': the trace only.")
_BUDGET = flags.DEFINE_integer("budget", _DEFAULT.budget, "Of the engine.", lower_bound=4)
_CHATS = flags.DEFINE_integer("chats", _DEFAULT.chats, "Two-turn chats.", lower_bound=1)
_CACHE_DIR = flags.DEFINE_string("cache_dir", _DEFAULT.cache_dir, "As for jaxserve.main.")
_OUT = flags.DEFINE_string("out", None, "Folder of the results. Default: runs/prefix_reuse.")
_RECORD = flags.DEFINE_bool("record", False, "Keep the results in the experiment's results/.")


def main(argv):
  def chosen():
    pools = case.numbers("pools", _POOLS.value)
    return config.Config(
      trace=_TRACE.value, page_size=_PAGE_SIZE.value, model=_MODEL.value or None,
      pools=(*filter(None, pools), *(pool for pool in pools if not pool)),
      budget=_BUDGET.value, chats=_CHATS.value, cache_dir=_CACHE_DIR.value,
    )  # fmt: skip

  return flow.execute(
    __file__, argv, chosen, run.run, plot.page, out=_OUT.value, record=_RECORD.value
  )


if __name__ == "__main__":
  app.run(main, flags_parser=case.flags_parser("prefix_reuse", FLAGS, flags.Error))
