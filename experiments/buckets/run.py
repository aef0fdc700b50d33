"""Token counts of a load's steps, and the buckets that pad them least."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve import cost, sched, sim
from jaxserve.config import token_buckets

_STEPS_PER_CALL = 20_000


def token_counts(load, server, budget, policy="vllm_v1", buckets=None, on_progress=None):
  """i64[budget + 1]: how many steps of the load have so many tokens, in virtual time.

  Args:
    load: a workload.
    server: an `experiments.served.Server`.
    budget: of the steps.
    policy: of the scheduler.
    buckets: what steps are padded to meanwhile; None: `token_buckets(budget)`.
    on_progress: told how many more requests have been submitted.
  """
  config = server.scheduler(policy, budget)
  simulated = sim.Server(
    config=config, step_time=server.step_time(), buckets=tuple(buckets or token_buckets(budget))
  )
  params, requests = jax.tree.map(
    jnp.asarray, (sched.make_params(config, budget=budget), sim.requests_of(load, config))
  )

  def turn(carry):
    state, counts, left = carry
    state, decision = sim.step(state, requests, params, simulated)
    return state, counts.at[decision.num_tokens].add(1), left - 1

  @functools.partial(jax.jit, donate_argnums=0)
  def advance(state):
    zero = jax.tree.map(jnp.zeros_like, state.counts)  # its sums are 32 bits wide
    start = dataclasses.replace(state, counts=zero), jnp.zeros(budget + 1, jnp.int32)
    go = lambda carry: (carry[2] > 0) & sim.running(carry[0], requests)
    return lax.while_loop(go, turn, (*start, jnp.int32(_STEPS_PER_CALL)))[:2]

  outputs = int((requests.max_total - requests.num_prompt).sum())
  state, total = sim.init(config, len(load), outputs), np.zeros(budget + 1, np.int64)
  while bool(sim.running(state, requests)):
    before = int(state.next)
    state, counts = advance(state)
    total += np.asarray(counts)
    if on_progress:
      on_progress(int(state.next) - before)
  total[0] = 0  # steps without a token are none
  return total


def costs(model, hardware, budget, objective):
  """f64[budget + 1]: what a step padded to so many tokens costs.

  Args:
    model: a `cost.ModelCost`.
    hardware: a `cost.Hardware`.
    budget: the last.
    objective: "tokens", or "seconds": what depends on the bucket in the roofline's step time.
  """
  tokens = np.arange(budget + 1, dtype=float)
  if objective == "tokens":
    return tokens
  weights = cost.weight_bytes(model) / hardware.bandwidth
  products = np.array([cost.gemm_flops(model, int(n)) for n in tokens]) / hardware.flops
  return np.maximum(products, weights)


def best(counts, cost_of, most):
  """The buckets of least cost: exact, by dynamic programming. Cost: O(most * budget^2).

  Args:
    counts: [budget + 1], steps of so many tokens.
    cost_of: [budget + 1], rising, of a step in a bucket of so many.
    most: buckets; the last is the budget.

  Returns:
    Rising token counts, at most `most`.
  """
  budget = len(counts) - 1
  below = np.cumsum(counts)
  least = np.full(budget + 1, np.inf)
  least[0] = 0
  choices = []
  for _ in range(most):
    # [last bucket, the one before it]: the steps between them run in the last.
    between = np.where(below[:, None] >= below, below[:, None] - below, 0)
    total = np.where(np.tri(budget + 1, k=-1), least + between * cost_of[:, None], np.inf)
    total[0, 0] = 0
    choices.append(total.argmin(1))
    least = total.min(1)
  found, at = set(), budget
  for choice in reversed(choices):
    found.add(int(at))
    at = choice[at]
  return tuple(sorted(found - {0}))


def padding(counts, buckets, cost_of):
  """(share of padding in all tokens of the steps, padded over useful cost)."""
  tokens = np.arange(len(counts))
  bucket = np.asarray(buckets)[np.searchsorted(buckets, tokens)]
  useful, padded = (counts * tokens).sum(), (counts * bucket).sum()
  return 1 - useful / padded, (counts * cost_of[bucket]).sum() / (counts * cost_of).sum()


def compare(counts, cost_of, budget, limits):
  """One row for the default buckets, one for the best of every compile-count limit."""
  tables = [("default", token_buckets(budget))]
  tables += [(f"best {most}", best(counts, cost_of, most)) for most in limits]
  rows = []
  for name, buckets in tables:
    share, ratio = padding(counts, buckets, cost_of)
    rows.append({
      "name": name, "count": len(buckets), "padding_share": share, "padded_cost": ratio,
      "buckets": ", ".join(map(str, buckets)),
    })  # fmt: skip
  return rows
