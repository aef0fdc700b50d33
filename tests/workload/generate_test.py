import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import workload

COUNT = 20_000


def rng(seed=0):
  return np.random.default_rng(seed)


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(cv):
  gaps = np.diff(workload.gamma_arrivals(rng(), COUNT, rate=4.0, cv=cv), prepend=0.0)
  assert (gaps >= 0).all()
  np.testing.assert_allclose(gaps.mean(), 0.25, rtol=0.05 * max(cv, 1))
  np.testing.assert_allclose(gaps.std() / gaps.mean(), cv, rtol=0.1)


def test_poisson_is_gamma_of_variation_one():
  a = workload.poisson_arrivals(rng(5), 9, rate=2.0)
  np.testing.assert_array_equal(a, workload.gamma_arrivals(rng(5), 9, rate=2.0, cv=1.0))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 500), st.integers(0, 5000), st.floats(1, 4000))
def test_lengths_stay_in_range_and_repeat_with_the_seed(seed, low, spread, median):
  high = low + spread
  for make in (
    lambda r: workload.uniform(r, 50, low=low, high=high),
    lambda r: workload.lognormal(r, 50, median=median, sigma=1.0, low=low, high=high),
    lambda r: workload.histogram(r, 50, edges=[low, low + 1, high + 2], counts=[1, 2]),
  ):
    first, second = make(rng(seed)), make(rng(seed))
    assert first.dtype == np.int32 and first.shape == (50,)
    assert (first >= low).all() and (first <= high + 1).all()
    np.testing.assert_array_equal(first, second)


def test_distributions_have_the_shape_asked_for():
  assert (workload.fixed(3, 7) == 7).all()
  tokens = workload.lognormal(rng(), COUNT, median=500, sigma=0.8, high=10**6)
  np.testing.assert_allclose(np.median(tokens), 500, rtol=0.03)
  np.testing.assert_allclose(np.log(tokens).std(), 0.8, rtol=0.03)
  drawn = workload.histogram(rng(), COUNT, edges=[1, 2, 10, 100], counts=[1, 0, 3])
  share = [(drawn < 2).mean(), ((drawn >= 2) & (drawn < 10)).mean(), (drawn >= 10).mean()]
  np.testing.assert_allclose(share, [0.25, 0, 0.75], atol=0.02)


WRONG = {
  "rate=0": lambda: workload.poisson_arrivals(rng(), 1, rate=0),
  "cv=-1": lambda: workload.gamma_arrivals(rng(), 1, rate=1, cv=-1),
  "tokens=0": lambda: workload.fixed(1, 0),
  "low=3, high=2": lambda: workload.uniform(rng(), 1, low=3, high=2),
  "low=0": lambda: workload.lognormal(rng(), 1, median=1, sigma=1, low=0, high=2),
  "sigma=nan": lambda: workload.lognormal(rng(), 1, median=1, sigma=np.nan, high=2),
  "edges=": lambda: workload.histogram(rng(), 1, edges=[1, 2], counts=[1, 1]),
  "edges=.*from 1 on": lambda: workload.histogram(rng(), 1, edges=[0, 2], counts=[1]),
  "counts=": lambda: workload.histogram(rng(), 1, edges=[1, 2], counts=[0]),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
  with pytest.raises(ValueError, match=message):
    WRONG[message]()
