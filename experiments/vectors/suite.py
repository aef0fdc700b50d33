"""All scenarios of a file, in whichever format, one outcome each."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from experiments.vectors import sglang, vllm_cases, vllm_kv, vllm_ops, vllm_steps, vllm_summary
from experiments.vectors.outcome import Differs, Outcome, Unsupported

Runner = Callable[[Mapping[str, Any], Mapping[str, Any]], None]

KINDS: dict[str, Runner] = {
  "step_loop": vllm_steps.run,
  "ops": vllm_ops.run,
  "kv_manager": vllm_kv.run,
  "summary": vllm_summary.run,
}
SECTIONS: dict[str, Runner | None] = {
  "config_cases": vllm_cases.run_config,
  "request_cases": vllm_cases.run_request,
  "scenarios": None,  # by kind or policy
  "ops_scenarios": vllm_ops.run,
  "kv_scenarios": vllm_kv.run,
}
DESCRIPTIONS = ("meta", "schema")


def _runner(section: str, scenario: Mapping[str, Any]) -> Runner:
  kind = scenario.get("kind")
  if kind is not None:
    if kind not in KINDS:
      raise Unsupported(f"scenarios of kind {kind}")
    return KINDS[kind]
  if section == "scenarios" and "policy" in scenario:
    return sglang.run
  runner = SECTIONS.get(section)
  if runner is None:
    raise Unsupported(f"scenarios of section {section} without a kind")
  return runner


def run_one(
  section: str, name: str, scenario: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Outcome:
  """Runs one scenario. Whatever goes wrong inside it counts as a difference."""
  try:
    _runner(section, scenario)(scenario, defaults)
  except Unsupported as why:
    return Outcome("unsupported", name, str(why))
  except Differs as why:
    return Outcome("differs", name, str(why))
  except Exception as error:
    return Outcome("differs", name, f"{type(error).__name__}: {error}")
  return Outcome("pass", name)


def run(document: Mapping[str, Any], only: str = "") -> Iterator[Outcome]:
  """Outcomes in file order; scenarios without a name are called by section and position."""
  defaults = document.get("meta", {}).get("defaults_for_missing_config_keys", {})
  for section, scenarios in document.items():
    if section in DESCRIPTIONS:
      continue
    if not isinstance(scenarios, list):
      yield Outcome("unsupported", section, "unknown section")
      continue
    for number, scenario in enumerate(scenarios):
      name = scenario.get("name", f"{section}[{number}]")
      if only in name:
        yield run_one(section, name, scenario, defaults)
