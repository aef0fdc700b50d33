"""Ahead-of-time compilation: programs in, a table of executables and its report out."""

import concurrent.futures
import contextlib
import gc
from collections.abc import Iterable, Iterator

import jax

from jaxserve.engine import clock
from jaxserve.engine.executables import CompileReport, ExecutableTable
from jaxserve.engine.programs import Program
from jaxserve.engine.store import ExecutableStore
from jaxserve.progress import progress


def compile_all(
  programs: Iterable[Program], workers: int = 2, store: ExecutableStore | None = None
) -> ExecutableTable:
  """Traces programs one after another and compiles them in `workers` threads.

  Args:
    programs: the first ones should be those that take longest.
    workers: threads; XLA leaves Python while it compiles.
    store: what it keeps is neither traced nor compiled; what it lacks, it is given.

  Returns:
    The table, not yet sealed.
  """
  table = ExecutableTable()
  programs = list(programs)
  with (
    _collector_paused(),
    progress(len(programs), "programs", "Compiling") as bar,
    concurrent.futures.ThreadPoolExecutor(workers) as pool,
  ):

    def add(compiled: jax.stages.Compiled, report: CompileReport) -> None:
      table.add(compiled, report)
      bar.advance(1, note=_describe(report))

    kept = [pool.submit(_restore, program, store) for program in programs]
    compiling = []
    for program, restoring in zip(programs, kept, strict=True):
      if found := restoring.result():
        add(*found)
        continue
      start = clock.now()
      lowered = _lower(program)
      trace_s = clock.now() - start
      compiling.append(pool.submit(_compile, program, lowered, trace_s, store))
    for future in concurrent.futures.as_completed(compiling):
      add(*future.result())
  if store:
    store.prune()
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


def _lower(program: Program) -> jax.stages.Lowered:
  options = program.compiler_options or None
  jitted = jax.jit(program.fn, donate_argnums=program.donate, compiler_options=options)
  return jitted.lower(*program.args)


def _restore(
  program: Program, store: ExecutableStore | None
) -> tuple[jax.stages.Compiled, CompileReport] | None:
  start = clock.now()
  compiled = store.load(program) if store else None
  if compiled is None:
    return None
  return compiled, _report(program, compiled, 0.0, clock.now() - start, cache_hit=True)


def _compile(
  program: Program, lowered: jax.stages.Lowered, trace_s: float, store: ExecutableStore | None
) -> tuple[jax.stages.Compiled, CompileReport]:
  start = clock.now()
  compiled = store.load_lowered(program, lowered) if store else None
  hit = compiled is not None
  if compiled is None:
    compiled = lowered.compile()
    if store:
      store.save(program, lowered, compiled)
  return compiled, _report(program, compiled, trace_s, clock.now() - start, cache_hit=hit)


def _report(
  program: Program,
  compiled: jax.stages.Compiled,
  trace_s: float,
  compile_s: float,
  cache_hit: bool,
) -> CompileReport:
  memory = compiled.memory_analysis()
  return CompileReport(
    key=program.key,
    trace_s=trace_s,
    compile_s=compile_s,
    cache_hit=cache_hit,
    temp_bytes=int(getattr(memory, "temp_size_in_bytes", 0)),
    alias_bytes=int(getattr(memory, "alias_size_in_bytes", 0)),
  )


def _describe(report: CompileReport) -> str:
  source = "cached" if report.cache_hit else "compiled"
  return f"{' '.join(map(str, report.key))}: {source} in {report.compile_s:.1f} s"
