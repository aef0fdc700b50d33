"""Virtual time that never loses a nanosecond: whole seconds and nanoseconds, as POSIX timespec.

A float32 counts 2^24 steps of whatever unit: 17 s in microseconds, hours in milliseconds. Two int32
hold 68 years in nanoseconds, add exactly, and need no 64-bit mode of JAX.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pytree import pytree_dataclass

_NANOS = 1_000_000_000


@pytree_dataclass
class Instant:
  """A point in time, or a length of time.

  s: i32[...], whole seconds.
  ns: i32[...], nanoseconds, in [0, 10^9).
  """

  s: jax.Array
  ns: jax.Array


def zero() -> Instant:
  """The begin of time."""
  return Instant(s=jnp.zeros((), jnp.int32), ns=jnp.zeros((), jnp.int32))


def from_seconds(seconds: np.ndarray) -> Instant:
  """f64 seconds on the host, to the nearest nanosecond."""
  whole = np.floor(seconds)
  nanos = np.rint((seconds - whole) * _NANOS).astype(np.int64)
  carry = nanos == _NANOS
  s, ns = whole + carry, np.where(carry, 0, nanos)
  return Instant(s=cast(Any, s.astype(np.int32)), ns=cast(Any, ns.astype(np.int32)))


def to_seconds(instant: Instant) -> Any:
  """f64 seconds on the host, exact to the nanosecond for some 100 days."""
  return np.asarray(instant.s, np.float64) + np.asarray(instant.ns, np.float64) / _NANOS


def duration(seconds: jax.Array) -> Instant:
  """f32 seconds, not negative, to the nearest nanosecond.

  10^9 = 2^9 * 5^9, so a second is taken as 512 parts of 1,953,125 ns: splitting by powers of two
  loses nothing, and products stay below 2^24.
  """
  seconds = jnp.asarray(seconds, jnp.float32)
  whole = jnp.floor(seconds)
  parts = (seconds - whole) * 2**9
  part = jnp.floor(parts)
  nanos = part.astype(jnp.int32) * 5**9 + jnp.rint((parts - part) * 5**9).astype(jnp.int32)
  return _normal(whole.astype(jnp.int32), nanos)


def add(a: Instant, b: Instant) -> Instant:
  """a + b."""
  return _normal(a.s + b.s, a.ns + b.ns)  # the sum of nanoseconds is below 2^31


def later(a: Instant, b: Instant) -> Instant:
  """The later of two."""
  return where(before(a, b), b, a)


def before(a: Instant, b: Instant) -> jax.Array:
  """bool[...]: a < b."""
  return (a.s < b.s) | ((a.s == b.s) & (a.ns < b.ns))


def where(condition: jax.Array, a: Instant, b: Instant) -> Instant:
  """a where the condition holds, else b."""
  return Instant(s=jnp.where(condition, a.s, b.s), ns=jnp.where(condition, a.ns, b.ns))


def _normal(s: jax.Array, ns: jax.Array) -> Instant:
  carry = ns >= _NANOS
  return Instant(s=s + carry.astype(jnp.int32), ns=jnp.where(carry, ns - _NANOS, ns))
