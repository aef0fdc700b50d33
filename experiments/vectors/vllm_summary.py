"""vLLM scenarios of which only the outcome is recorded: two turns of several chats."""

import re
from collections.abc import Mapping
from typing import Any

from experiments.vectors import vllm
from experiments.vectors.driver import Driver
from experiments.vectors.outcome import Unsupported, equal, known_fields

SCENARIO = ("name", "source", "kind", "note", "config", "expected")
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_TURNS = re.compile(r"(\w+) prompts of (\d+), (\d+) outputs each")


def run(scenario: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Compares how many tokens each chat is given in the first step of its second turn.

  The second prompt is the first with its outputs. How many chats, and how long, is in the note.

  Raises:
    Differs: it is another number.
    Unsupported: see `outcome`.
  """
  known_fields(scenario, SCENARIO, {}, "scenario")
  known_fields(scenario["expected"], ("turn2_scheduled_each",), {}, "expected")
  match = _TURNS.search(scenario.get("note", ""))
  if match is None:
    raise Unsupported("a summary without its sizes in the note")
  count = int(match[1]) if match[1].isdigit() else _NUMBERS.index(match[1].lower()) + 1
  prompt, outputs = int(match[2]), int(match[3])
  c = vllm.full_config(scenario["config"], defaults)
  driver = Driver(*vllm.make(c, count))
  for number in range(count):
    driver.submit(f"first {number}", prompt, prompt + outputs, await_host=not c["asynch"])
  _run_dry(driver, overlap=c["asynch"])
  for number in range(count):
    tokens = driver.tokens.get(f"first {number}", ())
    driver.submit(f"second {number}", prompt + outputs, prompt + 2 * outputs, prompt=tokens)
  step = driver.schedule()
  each = {name: scenario["expected"]["turn2_scheduled_each"] for name in driver.slots}
  equal("tokens of the second turn", step.tokens, each)


def _run_dry(driver: Driver, overlap: bool) -> None:
  """Serves all requests to their end, with one step in flight if `overlap`."""
  flights = [driver.schedule()] if overlap else []
  while driver.slots:
    flights.append(driver.schedule())
    driver.commit(flights.pop(0))
