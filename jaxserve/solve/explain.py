"""A solution in words: why this budget, and what to change when there is none."""

import math

from jaxserve.solve.solver import Case, Solution

_BECAUSE = {
  "compute": "the weight multiplications of the chunk take the most of it",
  "attention": "attention over the prefix takes the most of it",
  "decoder_kv": "reading the KV of the decoding requests takes the most of it",
  "weight_stream": "reading the weights takes the most of it: the chunk is below the ridge point",
  "ridge_floor": "the budget is at the ridge point: its tokens ride on the weight stream for "
  "nothing, a page more must be paid for",
}
_MILLI = 1e3


def reason(case: Case, solution: Solution) -> str:
  """One sentence or two: the budget, its worst step part by part, and what binds.

  Args:
    case: what was solved; plain numbers.
    solution: of it, feasible.

  Returns:
    text without line breaks.
  """
  parts, worst = solution.terms, solution.at_budget
  streaming = parts.weight_stream > parts.compute
  base, what = (
    (parts.weight_stream, "weights read") if streaming else (parts.compute, "weight products")
  )
  besides = f", overhead {_MILLI * case.overhead:.1f}" if case.overhead else ""
  return (
    f"A budget of {solution.budget:,} tokens keeps the target of {_MILLI * case.itl:g} ms: its "
    f"most expensive step takes {_MILLI * worst.itl:.1f} ms ({what} {_MILLI * base:.1f}, attention "
    f"to a prefix of {case.max_prefix:,} tokens {_MILLI * parts.attention:.1f}, KV of "
    f"{case.decoders} requests at {case.context:,} tokens {_MILLI * parts.decoder_kv:.1f}"
    f"{besides}), one page more {_MILLI * solution.at_next_page.itl:.1f}. Binding is "
    f"{solution.binding_name}: {_BECAUSE[solution.binding_name]}."
  )


def check_feasible(
  case: Case, solution: Solution, field: str = "itl_ms", others: str = "decoders"
) -> None:
  """Raises if no budget meets the target.

  Args:
    case: what was solved; plain numbers.
    solution: of it.
    field: name of the target in milliseconds, as the user knows it.
    others: what could be lowered instead, in the user's words.

  Raises:
    ValueError: names the target, its value, and the lowest target that can be met.
  """
  if solution.budget > 0:
    return
  # Rounded up to a tenth of a millisecond, so that the number shown can itself be used.
  lowest = math.ceil(10 * _MILLI * solution.lowest_itl) / 10
  raise ValueError(
    f"{field}={_MILLI * case.itl:g}: no budget keeps it. A step of {case.decoders} decodes alone, "
    f"at {case.context:,} tokens of context, takes {_MILLI * solution.decode:,.2f} ms, and with "
    f"the smallest chunk after a prefix of {case.max_prefix:,} tokens "
    f"{_MILLI * solution.lowest_itl:,.2f} ms; raise {field} to {lowest:.10g} or more, or lower "
    f"{others}"
  )
