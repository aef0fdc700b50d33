"""Budgets for a target: the reference case, what binds, and how the answer moves."""

import dataclasses
import math
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxserve import cost, cost_tables, solve

MODEL, H100 = cost.LLAMA3_8B, cost.H100
CASE = solve.Case(itl=0.060, decoders=32, context=2048, max_prefix=32768, page_size=64)


def solved(model=MODEL, hardware=H100, **changes):
  return solve.solve(model, hardware, dataclasses.replace(CASE, **changes))


def test_reference_case():
  solution = solved()
  assert (solution.budget, solution.gemm_only) == (832, 1536)
  assert format(1e3 * solution.at_budget.itl, ".1f") == "57.9"
  assert format(1e3 * solution.at_next_page.itl, ".1f") == "62.2"
  assert format(solution.ridge_tokens, ".0f") == "192"
  assert format(1e3 * solution.decode, ".1f") == "9.5"
  assert solution.binding_name == "attention"
  assert 1e3 * solution.at_gemm_only.itl > 100, "the rule of thumb misses its target"


def worst(budget, case=CASE):
  return cost.chunk_seconds(
    MODEL, H100, budget - case.decoders, case.max_prefix, rows=case.decoders, resident=case.resident
  )


def test_predicted_ttft_is_the_sum_of_the_steps():
  chunk = 832 - 32
  sizes = [min(chunk, 32768 - start) for start in range(0, 32768, chunk)]
  each = [
    cost.chunk_seconds(MODEL, H100, size, start, rows=32, resident=CASE.resident)
    for size, start in zip(sizes, range(0, 32768, chunk), strict=True)
  ]
  prediction = solved().at_budget
  assert prediction.steps == len(each) == 41
  assert prediction.ttft == pytest.approx(sum(each), rel=1e-12)
  assert prediction.first_itl == pytest.approx(each[0])
  assert prediction.itl == pytest.approx(worst(832)) and prediction.itl > max(each)
  assert prediction.prefill_throughput == pytest.approx(32768 / sum(each))
  assert prediction.output_throughput == pytest.approx(32 * 41 / sum(each))


def test_a_larger_budget_prefills_faster_and_stalls_longer():
  small, large = solved().at_budget, solved().at_gemm_only
  assert large.ttft < small.ttft and large.itl > small.itl


def test_a_budget_that_only_holds_the_decodes_never_prefills():
  prediction = solve.predict(MODEL, H100, CASE, 32)
  assert math.isinf(prediction.ttft) and math.isinf(prediction.steps)
  assert prediction.itl == pytest.approx(0.00948, rel=1e-3)
  assert prediction.prefill_throughput == 0
  assert prediction.output_throughput == pytest.approx(32 / prediction.itl)


WEIGHTS = cost.weight_bytes(MODEL) / H100.bandwidth
BINDING_CASES = {
  "compute": dict(max_prefix=1024),
  "attention": dict(),
  "decoder_kv": dict(itl=0.080, context=32768),
  "weight_stream": dict(itl=0.0125),
  "ridge_floor": dict(itl=WEIGHTS + 0.001, context=0, max_prefix=1024),
  "infeasible": dict(itl=0.009),
}


def test_every_constraint_has_a_case():
  assert tuple(BINDING_CASES) == solve.BINDINGS


@pytest.mark.parametrize("name", BINDING_CASES)
def test_binding_constraint(name):
  changes = BINDING_CASES[name]
  solution = solved(**changes)
  assert solution.binding_name == name
  parts = solution.terms
  shares = {
    "compute": parts.compute, "attention": parts.attention, "decoder_kv": parts.decoder_kv,
    "weight_stream": parts.weight_stream, "ridge_floor": parts.weight_stream,
  }  # fmt: skip
  if name != "infeasible":
    assert shares[name] == max(vars(parts).values())
    assert name in solve.reason(dataclasses.replace(CASE, **changes), solution)


def test_below_and_at_the_ridge_point():
  below, floor = solved(itl=0.0125), solved(**BINDING_CASES["ridge_floor"])
  assert 32 < below.budget + 64 <= below.ridge_tokens
  assert floor.budget <= floor.ridge_tokens < floor.budget + 64


def test_parts_add_up_to_the_worst_step():
  for changes in BINDING_CASES.values():
    solution = solved(**changes)
    parts = solution.terms
    step = max(parts.compute, parts.weight_stream) + parts.attention + parts.decoder_kv
    longest = solution.at_budget.itl if solution.budget else solution.lowest_itl
    assert longest == pytest.approx(step)


MODELS = st.sampled_from(sorted(cost_tables.MODELS))
DEVICES = st.sampled_from(sorted(cost_tables.DEVICES))
CASES = st.builds(
  solve.Case,
  itl=st.floats(1e-3, 2.0),
  decoders=st.integers(1, 512),
  context=st.integers(0, 32768),
  max_prefix=st.integers(1, 131072),
  page_size=st.sampled_from([1, 16, 64, 128]),
)


def on(model, device):
  return cost_tables.MODELS[model], cost_tables.DEVICES[device].hardware


@hypothesis.given(MODELS, DEVICES, CASES)
def test_the_budget_is_the_largest_that_meets_the_target(model, device, case):
  solution = solve.solve(*on(model, device), case)
  slack = 1 + 1e-9
  assert solution.budget % case.page_size == 0
  assert solution.at_next_page.itl * slack >= case.itl
  if solution.budget:
    assert solution.budget > case.decoders
    assert solution.at_budget.itl <= case.itl * slack
  else:
    assert solution.lowest_itl * slack >= case.itl


@hypothesis.given(MODELS, DEVICES, CASES, st.floats(1, 10))
def test_budgets_grow_with_the_target(model, device, case, factor):
  looser = dataclasses.replace(case, itl=case.itl * factor)
  tight, loose = (solve.solve(*on(model, device), c) for c in (case, looser))
  assert tight.budget <= loose.budget and tight.gemm_only <= loose.gemm_only
  assert not tight.budget or tight.at_budget.ttft >= loose.at_budget.ttft * (1 - 1e-9)
  assert tight.lowest_itl == loose.lowest_itl


@hypothesis.given(MODELS, DEVICES, CASES)
def test_the_lowest_target_that_the_error_names_can_be_met(model, device, case):
  solution = solve.solve(*on(model, device), case)
  if solution.budget:
    solve.check_feasible(case, solution)
    return
  with pytest.raises(ValueError) as error:
    solve.check_feasible(case, solution, "itl_ms", "decoders")
  found = re.search(r"raise itl_ms to ([0-9.e+]+) or more, or lower decoders", str(error.value))
  named = float(found[1])
  retry = dataclasses.replace(case, itl=named / 1e3 * (1 + 1e-6))
  assert solve.solve(*on(model, device), retry).budget >= solve.smallest_budget(case)


def test_sweeps_trace_and_equal_plain_numbers():
  targets = [0.009, 0.0125, 0.020, 0.060, 0.200]
  sweep = jax.jit(jax.vmap(lambda itl: solved(itl=itl)))(jnp.array(targets))
  plain = [solved(itl=itl) for itl in targets]
  for got, want in zip(jax.tree.leaves(sweep), zip(*map(jax.tree.leaves, plain), strict=True),
                       strict=True):  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-5)
  assert list(sweep.budget) == [s.budget for s in plain] and sweep.budget[0] == 0


@pytest.mark.parametrize("field", ["decoders", "context", "max_prefix"])
def test_every_number_of_the_case_can_be_swept(field):
  values = jnp.array([1, 16, 128], jnp.int32)
  sweep = jax.vmap(lambda x: solved(**{field: x}))(values)
  plain = [solved(**{field: int(x)}) for x in values]
  assert list(sweep.budget) == [s.budget for s in plain]
  np.testing.assert_allclose(sweep.at_budget.ttft, [s.at_budget.ttft for s in plain], rtol=1e-5)


@pytest.mark.parametrize(
  ("field", "value"),
  [("itl", 0), ("itl", -1.0), ("itl", math.inf), ("itl", math.nan), ("decoders", 0),
   ("context", -1), ("max_prefix", 0), ("page_size", 0)],
)  # fmt: skip
def test_a_field_out_of_range_is_named_with_its_value(field, value):
  with pytest.raises(ValueError, match=f"{field}={value}: must be"):
    dataclasses.replace(CASE, **{field: value})


def test_the_reason_has_the_numbers():
  text = solve.reason(CASE, solved())
  for words in ("832 tokens", "target of 60 ms", "57.9 ms", "62.2", "prefix of 32,768",
                "32 requests at 2,048", "Binding is attention"):  # fmt: skip
    assert words in text
