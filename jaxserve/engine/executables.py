"""A sealed table of compiled executables, and a guard that counts compiles after sealing."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

Key = tuple[Any, ...]

_COMPILE_EVENTS = "/jax/core/compile/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileReport:
  """How one executable came about.

  Attributes:
    key: in the table.
    trace_s: seconds to trace and lower it; 0 where the store kept it.
    compile_s: seconds of XLA, or of reading a cache.
    cache_hit: the store of executables had it.
    temp_bytes: scratch memory while it runs.
    alias_bytes: arguments it updates in place.
  """

  key: Key
  trace_s: float
  compile_s: float
  cache_hit: bool
  temp_bytes: int
  alias_bytes: int


class MissingExecutableError(LookupError):
  """A step asked for a shape that was never compiled; nothing is compiled on demand."""


class ExecutableTable:
  """Compiled executables by key. After `seal` it cannot change, and a miss is an error."""

  def __init__(self) -> None:
    self._table: dict[Key, jax.stages.Compiled] = {}
    self._reports: list[CompileReport] = []
    self._sealed = False

  def add(self, compiled: jax.stages.Compiled, report: CompileReport) -> None:
    """Puts an executable in; an error once sealed."""
    if self._sealed:
      raise RuntimeError(f"executable {report.key}: the table is sealed")
    self._table[report.key] = compiled
    self._reports.append(report)

  def seal(self) -> None:
    """Forbids additions."""
    self._sealed = True

  def check_in_place(self, kv_bytes: Mapping[str, int]) -> None:
    """Raises a RuntimeError if a program would copy the KV cache at every step.

    Args:
      kv_bytes: size of the cache that programs update, by the first word of their keys.
    """
    for report in self._reports:
      size = kv_bytes.get(report.key[0], 0)
      if report.alias_bytes < size:
        raise RuntimeError(
          f"executable {report.key} updates {report.alias_bytes} bytes in place, the KV cache has "
          f"{size}: it would be copied at every step"
        )

  @property
  def reports(self) -> tuple[CompileReport, ...]:
    """One report per executable."""
    return tuple(self._reports)

  def __getitem__(self, key: Key) -> jax.stages.Compiled:
    try:
      return self._table[key]
    except KeyError:
      known = ", ".join(str(k) for k in sorted(self._table, key=str) if k[0] == key[0])
      raise MissingExecutableError(
        f"no executable for {key}: compiled were {known or 'none of this kind'}"
      ) from None


class CompileGuard:
  """Counts traces, lowerings and compiles anywhere in the process between `start` and `stop`.

  It listens to JAX's public monitoring events, so it also sees a stray jnp operation on the host
  path, which a table of executables alone would not.
  """

  def __init__(self) -> None:
    self.count = 0

  def start(self) -> None:
    """Counts from now on."""
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def stop(self) -> None:
    """Stops counting."""
    jax.monitoring.unregister_event_duration_listener(self._listen)

  def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
    del duration_secs, kwargs
    self.count += event.startswith(_COMPILE_EVENTS)
