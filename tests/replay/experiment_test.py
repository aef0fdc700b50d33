"""What the runs of one experiment are."""

from jaxserve import sched
from jaxserve.replay import experiment
from tests.testing.engines import SCHEDULER, tiny_engine


def test_compared_policies_keep_every_other_setting():
  engine = tiny_engine(other_policies=("sarathi_dynamic", "prefill_first"))
  params = sched.make_params(
    SCHEDULER, budget=24, max_num_seqs=3, long_prefill_token_threshold=7, cap_when_alone=False,
    watermark=0.1,
  )  # fmt: skip
  engine.set_policy("vllm_v1", params)
  runs = experiment.settings(engine, ["vllm_v1", "sarathi_dynamic", "prefill_first"])
  assert [name for name, _, _ in runs] == ["vllm_v1", "sarathi_dynamic", "prefill_first"]
  assert [int(p.budget) for _, _, p in runs] == [24, 24, SCHEDULER.max_model_len]
  assert [set(p.policy) for _, _, p in runs] == [
    set(),
    {"low", "high", "stages", "max_tokens"},
    set(),
  ]
  for _, _, p in runs:
    kept = (p.max_num_seqs, p.long_prefill_token_threshold, p.cap_when_alone, p.watermark_pages)
    assert kept == (3, 7, False, 2)


def test_without_a_comparison_the_second_run_is_unchunked():
  engine = tiny_engine(other_policies=("sarathi_dynamic", "prefill_first"))
  engine.set_policy("vllm_v1", sched.make_params(SCHEDULER, budget=24))
  (name, _, chosen), (other, policy, whole) = experiment.settings(engine, [])
  assert (name, other, policy) == ("chunked at 24", "unchunked", "vllm_v1")
  assert bool(chosen.chunked_prefill) and not bool(whole.chunked_prefill)
  assert int(whole.budget) == SCHEDULER.max_model_len
