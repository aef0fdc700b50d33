"""From the name and arguments of a policy to (SchedulerConfig, SchedulerParams)."""

from collections.abc import Mapping
from typing import Any

from experiments.vectors.driver import replaced
from experiments.vectors.outcome import Unsupported
from jaxserve import sched
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.types import SchedulerParams

DEFAULT = "vllm_v1"


def available() -> frozenset[str]:
  """Names of the policies that this version has."""
  return frozenset(sched.POLICIES)


def make(
  name: str,
  arguments: Mapping[str, Any],
  numbers: Mapping[str, int],
  *,
  num_pages: int,
  page_size: int,
  num_requests: int,
  max_budget: int,
  chunked_prefill: bool = True,
  **fields: Any,
) -> tuple[SchedulerConfig, SchedulerParams]:
  """A configuration just large enough for a scenario.

  Args:
    name: of the policy.
    arguments: its own, by their upstream names.
    numbers: fields of SchedulerParams, put in as they are: upstream tests use what is refused here,
      such as a budget below max_num_seqs.
    num_pages: of the pool.
    page_size: tokens a page.
    num_requests: of the scenario; rounded up, so that scenarios share compiled functions.
    max_budget: most tokens of one step; rounded up.
    chunked_prefill: prompts may be split.
    **fields: other fields of SchedulerConfig.

  Raises:
    Unsupported: no such policy, or it does not know an argument.
  """
  if name == "sarathi" and "dynamic" in arguments:
    name, arguments = "sarathi_dynamic", arguments["dynamic"]
  if name not in available():
    raise Unsupported(f"no policy {name} yet")
  seats = max(16, _power_of_two(num_requests), numbers.get("max_num_seqs", 1))
  config = SchedulerConfig(
    policy=name,
    cache=CacheConfig(num_pages=num_pages, page_size=page_size),
    max_num_seqs=seats,
    max_requests=seats,
    max_budget=max(8192, _power_of_two(max_budget), seats),
    **fields,
  )
  try:
    params = sched.make_params(config, chunked_prefill=chunked_prefill, policy=arguments)
  except (KeyError, TypeError, ValueError) as error:
    raise Unsupported(f"policy {name} refuses its arguments: {error}") from error
  return config, replaced(params, numbers)


def _power_of_two(number: int) -> int:
  return 1 << max(0, number - 1).bit_length()
