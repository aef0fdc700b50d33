from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sim import clock
from jaxserve.sim.clock import Instant

NANOS = 10**9
TIMES = st.integers(0, 2**30 * NANOS)


def instant(nanos):
  return Instant(s=jnp.int32(nanos // NANOS), ns=jnp.int32(nanos % NANOS))


def nanos(instant):
  return int(instant.s) * NANOS + int(instant.ns)


@given(TIMES, TIMES)
def test_sum_and_order_are_those_of_integers(a, b):
  x, y = instant(a), instant(b)
  assert nanos(clock.add(x, y)) == a + b if a + b < 2**31 * NANOS else True
  assert bool(clock.before(x, y)) == (a < b)
  assert nanos(clock.later(x, y)) == max(a, b)


@given(st.floats(0, 1e5, width=32))
def test_a_duration_is_the_nearest_nanosecond(seconds):
  found = nanos(clock.duration(jnp.float32(seconds)))
  assert abs(found - Fraction(seconds) * NANOS) <= Fraction(9, 16)


@given(st.integers(0, 90 * 86400 * NANOS))
def test_seconds_on_the_host_and_back(time):
  there = clock.from_seconds(np.asarray(time / NANOS))
  assert abs(nanos(there) - time) <= 2
  assert abs(float(clock.to_seconds(there)) - time / NANOS) <= 2e-9


def test_rounding_up_carries_into_the_second():
  assert nanos(clock.from_seconds(np.asarray(1.9999999999))) == 2 * NANOS
  assert int(clock.from_seconds(np.asarray(1.9999999999)).s) == 2


def test_a_long_run_loses_nothing():
  """A million steps of 7 ms and 1 ns, where float32 seconds would be off by minutes."""
  now, length = clock.zero(), clock.duration(jnp.float32(0.007))
  thousand = instant(1000 * nanos(length))
  for _ in range(1000):
    now = clock.add(now, thousand)
  assert nanos(now) == 10**6 * nanos(length)
