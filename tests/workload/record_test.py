import numpy as np
import pytest

from jaxserve.workload import Workload

LOAD = Workload(
  arrival_s=[0.0, 1.0, 1.0, 4.0], num_prompt=[5, 6, 7, 80], num_output=[1, 2, 3, 40],
  priority=[0, 2, 1, 0],
)  # fmt: skip


def test_slices_and_rates():
  assert LOAD.first(2).num_prompt.tolist() == [5, 6]
  assert LOAD.until(4.0).num_output.tolist() == [1, 2, 3]
  assert LOAD.until(4.1).priority.tolist() == [0, 2, 1, 0]
  assert LOAD.fitting(119).num_prompt.tolist() == [5, 6, 7] and len(LOAD.fitting(120)) == 4
  assert LOAD.rate == 1.0 and LOAD.faster(4.0).rate == 4.0 and LOAD.span_s == 4.0
  assert LOAD.faster(2.0).arrival_s.tolist() == [0.0, 0.5, 0.5, 2.0]
  assert LOAD.where(np.arange(4) % 2 == 0).arrival_s.tolist() == [0.0, 1.0]
  assert len(LOAD.first(0)) == 0 == LOAD.first(0).rate


def test_arrays_have_the_promised_types():
  assert LOAD.arrival_s.dtype == np.float64
  assert {LOAD.num_prompt.dtype, LOAD.num_output.dtype, LOAD.priority.dtype} == {np.dtype("i4")}
  assert Workload(arrival_s=[1.0], num_prompt=[1], num_output=[1]).priority.tolist() == [0]


WRONG = {
  r"num_prompt\[1\]=0: must be at least 1": dict(num_prompt=[1, 0]),
  r"num_output\[0\]=-3": dict(num_output=[-3, 1]),
  r"num_output: has shape \(3,\)": dict(num_output=[1, 1, 1]),
  r"priority: has shape \(1,\)": dict(priority=[0]),
  r"arrival_s\[1\]=1.0: must never fall": dict(arrival_s=[2.0, 1.0]),
  r"arrival_s\[0\]=-1.0: must be finite": dict(arrival_s=[-1.0, 1.0]),
  r"arrival_s\[1\]=inf": dict(arrival_s=[0.0, np.inf]),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_fields_are_named(message):
  fields = dict(arrival_s=[0.0, 1.0], num_prompt=[1, 1], num_output=[1, 1]) | WRONG[message]
  with pytest.raises(ValueError, match=message):
    Workload(**fields)


@pytest.mark.parametrize("factor", [0, -1, np.nan, np.inf])
def test_a_factor_must_be_positive(factor):
  with pytest.raises(ValueError, match="factor"):
    LOAD.faster(factor)
