"""Ahead-of-time compilation: programs in, a table of executables and its report out."""

import concurrent.futures
import contextlib
import gc
import pathlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxserve.engine import clock
from jaxserve.engine.executables import CompileReport, ExecutableTable
from jaxserve.engine.programs import Program
from jaxserve.progress import progress

_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def use_compilation_cache(directory: pathlib.Path) -> None:
  """Keeps executables of all sizes in `directory`, readable by its owner alone.

  Whoever can write the cache can run code as its reader, hence the mode.
  """
  directory.mkdir(parents=True, exist_ok=True, mode=0o700)
  directory.chmod(0o700)
  jax.config.update("jax_compilation_cache_dir", str(directory))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_all(programs: Iterable[Program], workers: int = 2) -> ExecutableTable:
  """Traces programs one after another and compiles them in `workers` threads.

  Args:
    programs: the first ones should be those that take longest.
    workers: threads; XLA leaves Python while it compiles.

  Returns:
    The table, not yet sealed.
  """
  table, hits = ExecutableTable(), _CacheHits()
  programs = list(programs)
  jax.monitoring.register_event_listener(hits.listen)
  try:
    with (
      _collector_paused(),
      progress(len(programs), "programs", "Compiling") as bar,
      concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):
      futures = []
      for program in programs:
        start = clock.now()
        lowered = _lower(program)
        futures.append(pool.submit(_compile, program, lowered, clock.now() - start, hits))
      for future in concurrent.futures.as_completed(futures):
        compiled, report = future.result()
        table.add(compiled, report)
        bar.advance(1, note=_describe(report))
  finally:
    jax.monitoring.unregister_event_listener(hits.listen)
  return table


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
  """Tracing makes very many long-lived objects; collecting among them is a fifth of its time."""
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if was_enabled:
      gc.enable()


class _CacheHits:
  """Cache hits by thread: a compile runs in one thread, and so do its events."""

  def __init__(self) -> None:
    self._local = threading.local()

  def listen(self, event: str, **kwargs: Any) -> None:
    del kwargs
    if event == _CACHE_HIT:
      self._local.count = self.here() + 1

  def here(self) -> int:
    return getattr(self._local, "count", 0)


def _lower(program: Program) -> jax.stages.Lowered:
  options = program.compiler_options or None
  jitted = jax.jit(program.fn, donate_argnums=program.donate, compiler_options=options)
  return jitted.lower(*program.args)


def _compile(
  program: Program, lowered: jax.stages.Lowered, trace_s: float, hits: _CacheHits
) -> tuple[jax.stages.Compiled, CompileReport]:
  start, hits_before = clock.now(), hits.here()
  compiled = lowered.compile()
  memory = compiled.memory_analysis()
  return compiled, CompileReport(
    key=program.key,
    trace_s=trace_s,
    compile_s=clock.now() - start,
    cache_hit=hits.here() > hits_before,
    temp_bytes=int(getattr(memory, "temp_size_in_bytes", 0)),
    alias_bytes=int(getattr(memory, "alias_size_in_bytes", 0)),
  )


def _describe(report: CompileReport) -> str:
  source = "cached" if report.cache_hit else "compiled"
  return f"{' '.join(map(str, report.key))}: {source} in {report.compile_s:.1f} s"
