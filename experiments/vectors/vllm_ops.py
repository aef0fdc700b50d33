"""vLLM operation lists: add, schedule, update and finish in any order, with steps in flight."""

from collections.abc import Mapping
from typing import Any

from experiments.vectors import deliberate, vllm
from experiments.vectors.driver import Driver, Step
from experiments.vectors.outcome import Differs, Unsupported, equal, known_fields

SCENARIO = ("name", "source", "kind", "note", "config", "final", "ops")
OP_FIELDS = {
  "add": ("op", "request"),
  "schedule": ("op", "out", "expect", "asserted_by_source"),
  "update": ("op", "out", "sampled", "expect", "asserted_by_source"),
  "finish": ("op", "id", "ids", "status", "expect"),
  "drafts": ("op", "out", "drafts", "expect"),
}
LACKING_OPS = {
  "reset_prefix_cache": "a reset of the prefix cache while requests are served",
  "pause": "paused admission",
  "throttle": "throttled steps of data-parallel balancing",
}
AFTER_UPDATE = ("finished", "running", "waiting", "free_blocks", "outputs")
AFTER_SCHEDULE = (
  "scheduled", "new", "resumed", "preempted", "running", "waiting", "free_blocks",
  "num_computed_after_schedule", "num_sampled", "scheduled_draft_tokens",
)  # fmt: skip
FINAL = ("total_scheduled_tokens", "outputs", "running", "waiting", "free_blocks")
FINAL_OF_REQUEST = ("outputs", "num_computed", "num_tokens")


def run(scenario: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Carries the operations out and compares what each of them expects.

  Raises:
    Differs: at the first field that is not equal.
    Unsupported: see `outcome`.
  """
  known_fields(scenario, SCENARIO, {}, "scenario")
  c = vllm.full_config(scenario["config"], defaults)
  ops = scenario["ops"]
  for number, op in enumerate(ops):
    _check_op(number, op)
  requests = [vllm.parse_request(op["request"]) for op in ops if op["op"] == "add"]
  vllm.refuse_unservable(c, requests)
  runner = _Operations(c, vllm.urgency_ranks(c, requests))
  runner.check_final_fields(scenario.get("final") or {})
  for number, op in enumerate(ops):
    runner.carry_out(number, op)
  runner.compare_final(scenario.get("final") or {})


def _check_op(number: int, op: Mapping[str, Any]) -> None:
  kind = op["op"]
  if kind in LACKING_OPS:
    raise Unsupported(f"{LACKING_OPS[kind]} (operation {kind})")
  if kind not in OP_FIELDS:
    raise Unsupported(f"unknown operation {kind}")
  where = f"operation {number} {kind}"
  known_fields(op, OP_FIELDS[kind], LACKING_OPS, where)
  fields = AFTER_SCHEDULE if kind == "schedule" else AFTER_UPDATE
  for key in ("expect", "asserted_by_source"):
    rest = {k: v for k, v in (op.get(key) or {}).items() if not vllm.is_known(k, fields)}
    known_fields(rest, (), {}, where)


class _Operations:
  """One run. Outputs delivered are kept by request, as the host would."""

  def __init__(self, c: Mapping[str, Any], requests: list[vllm.Request]):
    self.c, self.requests = c, {r.id: r for r in requests}
    self.driver = Driver(*vllm.make(c, len(requests)))
    self.in_flight: dict[Any, Step] = {}
    self.delivered: dict[str, list[int]] = {r.id: [] for r in requests}
    self.total_scheduled = 0
    self.replayed_in_flight = False

  def carry_out(self, number: int, op: Mapping[str, Any]) -> None:
    seen = getattr(self, f"_{op['op']}")(op)
    for key in ("expect", "asserted_by_source"):
      self._compare(f"operation {number} {op['op']}", seen, op.get(key) or {})

  def _compare(self, where: str, seen: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    try:
      for field, expected in record.items():
        value = vllm.seen_value(field, seen, expected)
        expected = sorted(expected) if field in vllm.UNORDERED else expected
        equal(f"{where} {field}", value, expected)
    except Differs as difference:
      reason = deliberate.reason(self.c, self.requests, seen, record)
      if not reason and self.c["asynch"] and self.replayed_in_flight:
        reason = "a request preempted with an output in flight is replayed without waiting for it"
      if reason:
        raise Unsupported(f"deliberate: {reason} ({difference})") from difference
      raise

  def _add(self, op: Mapping[str, Any]) -> dict[str, Any]:
    vllm.submit_all(self.driver, self.c, [self.requests[str(op["request"]["id"])]])
    return {}

  def _schedule(self, op: Mapping[str, Any]) -> dict[str, Any]:
    step = self.driver.schedule()
    self.in_flight[op.get("out", len(self.in_flight))] = step
    self.total_scheduled += sum(step.tokens.values())
    self.replayed_in_flight |= bool(step.in_flight)
    return vllm.view(self.driver, step)

  def _update(self, op: Mapping[str, Any]) -> dict[str, Any]:
    out = op.get("out", next(iter(self.in_flight), None))
    if out != next(iter(self.in_flight), None):
      raise Unsupported(f"outputs out of order (update {out})")
    step = self.in_flight.pop(out)
    sampled = {str(k): v for k, v in (op.get("sampled") or {}).items()}
    counts, stopped = vllm.delivered(self.driver, step, self.requests, sampled)
    yields = self.driver.yields(step)
    given = [name for name, tokens in sampled.items() if tokens and name in self.driver.slots]
    equal(f"update {out} requests with an output", sorted(yields), sorted(given))
    for name in yields:
      self.delivered[name] += sampled[name][: counts[name]]
    return {"finished": self.driver.commit(step, stopped, counts)} | self._after()

  def _drafts(self, op: Mapping[str, Any]) -> dict[str, Any]:
    vllm.propose(self.driver, op.get("drafts"))
    return self._after()

  def _finish(self, op: Mapping[str, Any]) -> dict[str, Any]:
    names = [op["id"]] if "id" in op else op["ids"]
    return {"finished": self.driver.abort([str(name) for name in names])} | self._after()

  def _after(self) -> dict[str, Any]:
    return {
      "running": self.driver.running(),
      "waiting": self.driver.waiting(),
      "free_blocks": self.driver.free_pages(),
      "outputs": {name: len(tokens) for name, tokens in self.delivered.items()},
    }

  def check_final_fields(self, final: Mapping[str, Any]) -> None:
    known = [*FINAL, *(f"request_{r}_{f}" for r in self.requests for f in FINAL_OF_REQUEST)]
    known_fields(final, known, {}, "final")

  def compare_final(self, final: Mapping[str, Any]) -> None:
    seen = self._after() | {"total_scheduled_tokens": self.total_scheduled}
    for name in self.requests:
      seen[f"request_{name}_outputs"] = self.delivered[name]
      if name in self.driver.slots:
        field = lambda key, name=name: self.driver.field(key, name)  # noqa: E731
        seen[f"request_{name}_num_computed"] = field("num_computed")
        seen[f"request_{name}_num_tokens"] = field("num_known") - field("num_in_flight")
    for field, expected in final.items():
      if field == "outputs":
        equal("final outputs", {name: seen[field][name] for name in expected}, expected)
      elif field not in seen:
        raise Differs(f"final {field}: expected {expected}, but the request has ended")
      else:
        equal(f"final {field}", seen[field], expected)
    for name, count in self.driver.outputs.items():
      equal(f"outputs of request {name} counted by the scheduler", count, len(self.delivered[name]))
