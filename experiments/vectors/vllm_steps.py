"""vLLM step loops: arrivals, schedule, run, update, step by step."""

from collections.abc import Mapping
from typing import Any

from experiments.vectors import deliberate, vllm
from experiments.vectors.driver import Driver
from experiments.vectors.outcome import Differs, Unsupported, equal, known_fields

SEEN = (
  "scheduled", "new", "resumed", "preempted", "running", "waiting", "free_blocks",
  "num_computed_after_schedule", "num_sampled", "finished", "scheduled_draft_tokens",
)  # fmt: skip
BEFORE = ("input_abort_before_schedule", "input_finish_before_schedule")
DURING = ("input_abort_before_update", "input_finish_before_update")
AFTER = ("input_abort_after_update", "input_finish_after_update")
INPUTS = ("step", "sampled_by_model", "drafts_given_after_step", *BEFORE, *DURING, *AFTER)
LACKING = {
  "input_throttle": "throttled steps of data-parallel balancing",
  "input_pause": "paused admission",
  "input_reset_prefix_cache": "a reset of the prefix cache while requests are served",
}
SCENARIO = (
  "name", "source", "kind", "note", "config", "requests", "asserted_by_source", "expected",
)  # fmt: skip


def check_expected(record: Mapping[str, Any], where: str) -> None:
  """Refuses expectations that would not be compared."""
  rest = {k: v for k, v in record.items() if not vllm.is_known(k, SEEN)}
  known_fields(rest, INPUTS, LACKING, where)


def _names(record: Mapping[str, Any], fields: tuple[str, ...]) -> list[str]:
  return [str(name) for field in fields for name in record.get(field, ())]


def expectations(scenario: Mapping[str, Any]) -> dict[int, list[Mapping[str, Any]]]:
  """What is expected of each step: the simulated fields and those of the upstream test."""
  steps: dict[int, list[Mapping[str, Any]]] = {}
  for number, record in enumerate(scenario["expected"]):
    check_expected(record, f"step {record.get('step', number)}")
    steps.setdefault(record.get("step", number), []).append(record)
  for number, record in (scenario.get("asserted_by_source") or {}).items():
    check_expected(record, f"asserted_by_source {number}")
    steps.setdefault(int(number), []).append(record)
  return steps


def run(scenario: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Compares every expected field of every step.

  Raises:
    Differs: at the first field that is not equal.
    Unsupported: see `outcome`.
  """
  known_fields(scenario, SCENARIO, {}, "scenario")
  c = vllm.full_config(scenario["config"], defaults)
  steps = expectations(scenario)
  requests = vllm.urgency_ranks(c, [vllm.parse_request(r) for r in scenario["requests"]])
  vllm.refuse_unservable(c, requests)
  _Loop(c, requests).run(steps)


class _Loop:
  """One run of a scenario."""

  def __init__(self, c: Mapping[str, Any], requests: list[vllm.Request]):
    self.c, self.requests = c, {r.id: r for r in requests}
    self.driver = Driver(*vllm.make(c, len(requests)))

  def run(self, steps: Mapping[int, list[Mapping[str, Any]]]) -> None:
    last = max([*steps, *(r.step for r in self.requests.values())], default=-1)
    for number in range(last + 1):
      records = steps.get(number, [])
      seen = self.step(number, {k: v for record in records for k, v in record.items()})
      for record in records:
        self.compare(number, seen, record)

  def step(self, number: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
    arrivals = [r for r in self.requests.values() if r.step == number]
    vllm.submit_all(self.driver, self.c, arrivals)
    self.driver.abort(_names(inputs, BEFORE))
    step = self.driver.schedule()
    seen = vllm.view(self.driver, step)
    ended = self.driver.abort(_names(inputs, DURING))
    sampled = inputs.get("sampled_by_model", {})
    counts, stopped = vllm.delivered(self.driver, step, self.requests, sampled)
    ended += self.driver.commit(step, stopped, counts)
    ended += self.driver.abort(_names(inputs, AFTER))
    vllm.propose(self.driver, inputs.get("drafts_given_after_step"))
    seen["num_sampled"] |= {name: number for name, number in counts.items() if number > 1}
    return seen | {"finished": sorted(ended)}

  def compare(self, number: int, seen: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    try:
      for field, expected in record.items():
        if field in INPUTS or field in LACKING:
          continue
        value = vllm.seen_value(field, seen, expected)
        expected = sorted(expected) if field in vllm.UNORDERED else expected
        equal(f"step {number} {field}", value, expected)
    except Differs as difference:
      reason = deliberate.reason(self.c, self.requests, seen, record)
      if reason:
        raise Unsupported(f"deliberate: {reason} ({difference})") from difference
      raise
