"""What differs between the supported versions of JAX, for kernels in Pallas Mosaic GPU."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_load: Any = plgpu.load
_LOAD_TAKES_INDEX = "idx" in inspect.signature(_load).parameters
# InterpretGPUParams is new in jax 0.11.
_INTERPRETER = getattr(plgpu, "InterpretGPUParams", None)
HAS_INTERPRETER = _INTERPRETER is not None


def load(ref: Any, layout: Any) -> jax.Array:
  """All of `ref`, in shared or global memory, as registers in `layout`; any alignment will do."""
  index: tuple[Any, ...] = ((),) if _LOAD_TAKES_INDEX else ()
  return _load(ref, *index, layout=layout, optimized=False)


def interpreter(detect_races: bool = True) -> Any:
  """Parameters that run a kernel on the CPU.

  Raises:
    NotImplementedError: on jax before 0.11.
  """
  if _INTERPRETER is None:
    raise NotImplementedError(
      f"the interpreter of Mosaic GPU kernels needs jax 0.11 or newer; this is {jax.__version__}"
    )
  return _INTERPRETER(detect_races=detect_races)


def kernel(
  body: Callable[..., None],
  *,
  name: str,
  grid: dict[str, int],
  warpgroups: int,
  interpret: Any = None,
) -> Callable[..., None]:
  """A kernel that writes through the `jax.Ref`s among its arguments and returns nothing.

  Args:
    body: gets one ref per argument; `lax.axis_index` of a grid axis or of "wg" tells who runs.
    name: of the kernel, in profiles and dumps.
    grid: size of each axis; blocks that differ in the last one only run side by side.
    warpgroups: of 128 threads, per block.
    interpret: None, or what `interpreter` returns.
  """

  mesh = plgpu.Mesh(
    grid=tuple(grid.values()),
    grid_names=tuple(grid),
    num_threads=warpgroups,
    thread_name="wg",
    kernel_name=name,
  )

  # A function of its own for each call: jax 0.11 reuses the trace of one body across grids.
  def fresh(*refs: Any) -> None:
    body(*refs)

  return pl.kernel(
    fresh,
    (),
    mesh=mesh,
    compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    interpret=False if interpret is None else interpret,
    name=name,
  )
