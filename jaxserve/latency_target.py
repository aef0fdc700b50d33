"""What a latency target makes of the options: the budget, and the target that a policy keeps."""

from collections.abc import Mapping

import jax
from absl import logging

from jaxserve import cost, sched, solve
from jaxserve.config import ModelConfig
from jaxserve.cost_profile import Profile
from jaxserve.engine import hardware, profiles
from jaxserve.engine.defaults import Load


def solve_budget(
  model: ModelConfig, device: jax.Device, load: Load, *, itl_ms: float, context: int | None,
  dtype: str, profile: Profile | None,
) -> int:  # fmt: skip
  """The largest budget that keeps a target; logs it with the reason.

  Args:
    model: architecture.
    device: whose speed counts, unless there is a profile.
    load: what it has to serve.
    itl_ms: most milliseconds between two tokens of a stream.
    context: tokens of each stream; None: those of `load`.
    dtype: of weights and KV pages.
    profile: measured costs; None: what `hardware.find` says of the device.

  Raises:
    ValueError: no budget keeps it, or the profile is of something else.
  """
  width = 2 if dtype == "bfloat16" else 4
  overhead = 0.0
  if profile is None:
    costs, found = cost.ModelCost.of(model, width, width), hardware.find(device, dtype)
  else:
    profiles.check_model(profile, model, dtype)
    costs, found = profile.as_hardware()
    overhead = profile.overhead_s(load.decoders)
  case = solve.Case(
    overhead=overhead,
    itl=itl_ms / 1e3,
    decoders=load.decoders,
    context=load.context if context is None else context,
    max_prefix=load.max_prefix,
    page_size=load.page_size,
  )
  solution = solve.solve(costs, found, case)
  solve.check_feasible(
    case, solution, "itl_slo_ms", "max_num_seqs, max_model_len or itl_slo_context"
  )
  logging.info(
    "%s: %.4g GFLOP/s and %.4g GB/s achieved", found.name, found.flops / 1e9,
    found.bandwidth / 1e9,
  )  # fmt: skip
  logging.info("%s", solve.reason(case, solution))
  if solution.budget > load.max_budget:
    logging.info("More than a step can use: the budget is %d", load.max_budget)
  return int(min(solution.budget, load.max_budget))


def slo_aware_args(given: Mapping[str, float], profile: Profile) -> dict[str, float]:
  """Hyper-parameters of the policy slo_aware, with what `given` leaves out from a profile.

  Raises:
    ValueError: the profile's fixed costs alone exceed the target.
  """
  default = dict(sched.POLICIES["slo_aware"].defaults)["itl_target_ms"]
  target = given.get("itl_target_ms", default)
  # The policy predicts products and attention; what else a step takes is not its to spend.
  left = target - 1e3 * profile.overhead_s()
  if left <= 0:
    raise ValueError(
      f"policy_args=itl_target_ms={target:g}: by --profile a step takes {target - left:.1f} ms "
      "before it computes anything; raise it"
    )
  logging.info("slo_aware: %.1f of the target of %g ms are left for products", left, target)
  return {**profile.step_terms(), **given, "itl_target_ms": left}
