"""Series that need no server to be filled."""

import types

from jaxserve.engine.request import Scheduled, StepEvents, TokenEvent
from jaxserve.server.engine_thread import Report
from jaxserve.server.metrics import Metrics


def part(request_id, drafts, accepted):
  return Scheduled(
    request_id=request_id, start=9, tokens=1 + drafts, new_pages=0, samples=True, is_prefill=False,
    drafts=drafts, accepted=accepted,
  )  # fmt: skip


def report(parts, alive):
  outputs = tuple(
    TokenEvent(request_id=i, token=1, logprob=0.0, top_ids=(), top_logits=()) for i in alive
  )
  events = StepEvents(
    step=0, bucket=16, budget=16, scheduled=parts, admitted=(), preempted=(), dispatched_s=0.0,
    done_s=1.0, outputs=outputs,
  )  # fmt: skip
  return Report(
    events=events, tokens=(), admitted=(), refused=(), running=1, waiting=0, free_pages=1
  )


def test_drafts_are_counted_under_the_names_of_vllm():
  cache = types.SimpleNamespace(num_pages=4, page_size=16)
  scheduler = types.SimpleNamespace(cache=cache, prefix_cache=False)
  config = types.SimpleNamespace(scheduler=scheduler)
  metrics = Metrics("tiny", types.SimpleNamespace(config=config, retraces=0, compile_reports=()))
  metrics.on_report(report((part(1, 3, 2), part(2, 2, 0), part(3, 4, 4), part(4, 0, 0)), (1, 2, 4)))
  metrics.on_report(report((part(1, 0, 0),), (1,)))
  text = metrics.text(vllm_names=True).decode()
  labels = 'engine="0",model_name="tiny"'
  for prefix in ("jaxserve", "vllm"):
    for name, value in (("drafts", 2), ("draft_tokens", 5), ("accepted_tokens", 2)):
      assert f"{prefix}:spec_decode_num_{name}_total{{{labels}}} {value}.0" in text
    position = f'{{{labels},position="1"}} 1.0'
    assert f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total{position}" in text
