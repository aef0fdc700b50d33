"""Measured costs: the fit, the file, and what others make of a profile."""

import dataclasses
import json

import numpy as np
import pytest

from jaxserve import cost, cost_profile, solve
from jaxserve.cost_profile import Profile, StepCosts, StepWork
from jaxserve.engine import profiles

COSTS = StepCosts(
  step_s=2e-3, token_s=5e-5, weights_s=64 * 5e-5, pair_s=4e-9, kv_s=3e-7, row_s=1e-4,
  head_row_s=2e-4,
)  # fmt: skip
PROFILE = Profile(
  model="some", device="this", dtype="bfloat16", num_params=10_000_000, row_buckets=(8, 32),
  costs=COSTS,
)  # fmt: skip


def works():
  """Decodes, chunks, and both."""
  found = [
    StepWork(bucket=b, pairs=0, resident=r * context, decodes=r, head_rows=8 if r <= 8 else 32)
    for r, b in ((1, 1), (4, 4), (8, 8), (32, 32))
    for context in (16, 200, 2000)
  ]
  for chunk in (16, 64, 128, 256, 512):
    for prefix in (0, 700, 4000):
      pairs = chunk * (prefix + chunk / 2)
      found.append(StepWork(bucket=chunk, pairs=pairs, resident=0, decodes=0, head_rows=0))
      found.append(
        StepWork(bucket=chunk, pairs=pairs, resident=900, decodes=7, head_rows=8)
      )  # fmt: skip
  return found


def test_planted_costs_are_recovered():
  steps = works()
  found = cost_profile.fit(steps, [float(COSTS.seconds(w)) for w in steps])
  for key in cost_profile.COSTS:
    np.testing.assert_allclose(getattr(found.costs, key), getattr(COSTS, key), rtol=1e-6)
  assert found.quality()["max"] < 1e-6


def test_noise_and_steps_that_took_twice_as_long_hardly_move_the_fit():
  rng, steps = np.random.default_rng(0), works() * 4
  times = np.array([COSTS.seconds(w) for w in steps]) * rng.normal(1, 0.02, len(steps))
  times[::20] *= 2
  found = cost_profile.fit(steps, times.tolist())
  for key, part in (("step_s", 0.1), ("token_s", 0.05), ("pair_s", 0.1), ("kv_s", 0.2)):
    np.testing.assert_allclose(getattr(found.costs, key), getattr(COSTS, key), rtol=part)
  assert found.quality()["median"] < 0.03


def test_no_cost_is_negative():
  """Steps that get shorter with every row: the row then costs nothing."""
  steps = works()
  times = [float(COSTS.seconds(w)) - 1.05e-4 * w.decodes for w in steps]
  found = cost_profile.fit(steps, times)
  assert min(dataclasses.asdict(found.costs).values()) >= 0 and found.costs.row_s == 0


def test_too_little_to_fit():
  with pytest.raises(ValueError, match="steps=3: at least 7 measured steps"):
    cost_profile.fit(works()[:3], [1.0] * 3)
  with pytest.raises(ValueError, match="must be a positive number"):
    cost_profile.fit(works(), [0.0] * len(works()))


def test_work_of_a_step():
  """A chunk of 10 after 20, two decodes at 100 and 7 tokens; a head compiled for 4 rows."""
  rows = [(10, 20, False), (1, 100, True), (1, 7, True)]
  work = StepWork.of(rows, bucket=16, samples=True, row_buckets=(2, 4))
  assert work == StepWork(
    bucket=16, pairs=250, resident=107, decodes=2, head_rows=4, chunks=1
  )  # fmt: skip
  assert StepWork.of(rows, bucket=16, samples=False, row_buckets=(2, 4)).head_rows == 0


def test_a_profile_round_trips(tmp_path):
  path = tmp_path / "new" / "profile.json"
  profiles.save(path, PROFILE, residuals=[{"median": 0.1}])
  assert profiles.load(path) == PROFILE
  assert json.loads(path.read_text("utf-8"))["residuals"] == [{"median": 0.1}]


BAD = {
  "format": ({"format": "other"}, "format: must be"),
  "version": ({"version": 2}, "version=2: this release reads version 1; run"),
  "model": ({"model": ""}, "model='': must be a name"),
  "params": ({"num_params": 1.5}, "num_params=1.5: must be a whole number"),
  "rows": ({"row_buckets": []}, "row_buckets=[]: must be a list"),
  "order": ({"row_buckets": [8, 4]}, "row_buckets=[8, 4]: must rise"),
  "none": ({"costs": None}, "costs=None: must be an object"),
  "negative": ({"costs": {**dataclasses.asdict(COSTS), "kv_s": -1}}, "costs.kv_s=-1: must be"),
  "missing": ({"costs": {"step_s": 1}}, "costs.token_s=None: must be a positive number"),
  "infinite": (
    {"costs": {**dataclasses.asdict(COSTS), "step_s": float("inf")}}, "costs.step_s=inf",
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_profile_is_refused_with_field_and_remedy(name, tmp_path):
  changes, message = BAD[name]
  path = tmp_path / "bad.json"
  path.write_text(json.dumps(cost_profile.to_document(PROFILE) | changes), "utf-8")
  with pytest.raises(ValueError) as caught:
    profiles.load(path)
  assert message in str(caught.value) and "bad.json" in str(caught.value)
  assert "experiments.calibrate" in str(caught.value)


def test_a_file_that_is_none_or_no_json(tmp_path):
  with pytest.raises(ValueError, match=r"profile=.*none.json: cannot be read"):
    profiles.load(tmp_path / "none.json")
  (tmp_path / "text").write_text("hello")
  with pytest.raises(ValueError, match="is not JSON"):
    profiles.load(tmp_path / "text")


def test_the_arithmetic_of_cost_gives_the_measured_times():
  model, hardware = PROFILE.as_hardware()
  for chunk, prefix, rows, context in ((300, 900, 5, 50), (16, 0, 8, 2000), (20, 7, 1, 1)):
    work = StepWork(
      bucket=chunk + rows, pairs=chunk * (prefix + chunk / 2), resident=rows * context,
      decodes=rows, head_rows=8,
    )  # fmt: skip
    seconds = cost.chunk_seconds(model, hardware, chunk, prefix, rows=rows, resident=rows * context)
    np.testing.assert_allclose(seconds + PROFILE.overhead_s(rows), COSTS.seconds(work), rtol=1e-9)
    by_terms = cost.step_ms(PROFILE.step_terms(), chunk + rows, work.pairs, work.resident)
    np.testing.assert_allclose(by_terms / 1e3, seconds, rtol=1e-9)


def test_a_budget_is_solved_with_the_overhead_of_a_step():
  model, hardware = PROFILE.as_hardware()
  case = solve.Case(
    itl=0.05, decoders=8, context=500, max_prefix=2000, page_size=16,
    overhead=PROFILE.overhead_s(8),
  )  # fmt: skip
  found = solve.solve(model, hardware, case)
  assert found.at_budget.itl <= case.itl < found.at_next_page.itl
  without = solve.solve(model, hardware, dataclasses.replace(case, overhead=0.0))
  assert found.budget < without.budget and "overhead 4.4" in solve.reason(case, found)
  np.testing.assert_allclose(found.decode - without.decode, case.overhead)
  with pytest.raises(ValueError, match="overhead=-1: must be"):
    dataclasses.replace(case, overhead=-1)


def test_another_model_is_refused():
  from tests.testing.engines import MODEL

  with pytest.raises(ValueError, match="was measured with some, 10,000,000 parameters in bfloat16"):
    profiles.check_model(PROFILE, MODEL, "bfloat16")
