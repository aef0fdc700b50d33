"""Compiled executables kept between starts, found again without tracing.

JAX's compilation cache finds an executable by its lowered program, so a warm start still traces
and lowers every bucket: two thirds of its time. This store finds it by what the program is made
of: the function and its static arguments, the arguments' shapes, and everything around them that
decides what is compiled (`_code`, `_surroundings`). What cannot be described that way is found by
its lowered module alone.
"""

import concurrent.futures
import dataclasses
import enum
import functools
import hashlib
import inspect
import os
import pathlib
import pickle
import platform
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from absl import logging
from flax import nnx
from jax.experimental import serialize_executable

import jaxserve
import pallas_kernels
from jaxserve.engine.programs import Program

_MOST_KEPT = 512  # executables, of under a megabyte each
_READERS = 2
_PLAIN = (bool, int, float, str, bytes, type(None), type, np.dtype)


def private_folder(directory: pathlib.Path) -> pathlib.Path:
  """Makes a folder that its owner alone can read and write.

  Whoever can write a cache of executables can run code as its reader, hence the mode.
  """
  directory.mkdir(parents=True, exist_ok=True, mode=0o700)
  directory.chmod(0o700)
  return directory


class ExecutableStore:
  """A private folder of executables, found by two names.

  By `fingerprint`, which needs no trace; and by the lowered module, so that an edit of the source
  that leaves a program as it was costs a trace and no compilation.

  Attributes:
    kernels: a private folder beside it, for what executables call (`attention.register`).
  """

  def __init__(self, directory: pathlib.Path):
    self._directory = private_folder(directory)
    self.kernels = private_folder(directory.with_name("kernels"))
    self._ahead: dict[str, concurrent.futures.Future] = {}

  def read_ahead(self, programs: Sequence[Program]) -> None:
    """Begins to read them in threads, for the `load` of each that follows. Returns at once."""
    pool = concurrent.futures.ThreadPoolExecutor(_READERS)
    for program in programs:
      if (name := fingerprint(program)) is not None:
        self._ahead[name] = pool.submit(self._read, name, program)
    pool.shutdown(wait=False)

  def load(self, program: Program) -> jax.stages.Compiled | None:
    """The executable of `program`; None if it is not there or cannot be read."""
    name = fingerprint(program)
    if name is None:
      return None
    ahead = self._ahead.pop(name, None)
    found = ahead.result() if ahead else self._read(name, program)
    return found and found[0]

  def load_lowered(
    self, program: Program, lowered: jax.stages.Lowered
  ) -> jax.stages.Compiled | None:
    """The same, found by the lowered module; from now on `load` finds it as well."""
    found, name = self._read(_module_name(program, lowered), program), fingerprint(program)
    if found is None:
      return None
    compiled, content = found
    if name is not None:
      self._write(name, content)
    return compiled

  def save(
    self, program: Program, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled
  ) -> None:
    """Keeps a freshly compiled executable, where that is possible.

    Not where JAX's compilation cache is on: what came from there cannot be told from what is
    fresh, and XLA:CPU loses an executable's functions when it is serialized a second time.
    """
    if jax.config.values.get("jax_compilation_cache_dir"):
      return
    try:
      content = zlib.compress(pickle.dumps(serialize_executable.serialize(compiled)), level=1)
    except Exception as error:  # Not every backend and program can be serialized.
      logging.info("%s is not kept: %r", program.key, error)
      return
    for name in (fingerprint(program), _module_name(program, lowered)):
      if name is not None:
        self._write(name, content)

  def prune(self, most: int = _MOST_KEPT) -> None:
    """Deletes all but the `most` files used last."""
    files = sorted(self._directory.iterdir(), key=_last_used, reverse=True)
    for file in files[most:]:
      file.unlink(missing_ok=True)

  def _read(self, name: str, program: Program) -> tuple[jax.stages.Compiled, bytes] | None:
    """(the executable, its file's content); other processes may delete the file at any time."""
    path, device = self._directory / name, _device(program)
    try:
      content = path.read_bytes()
      os.utime(path)
    except FileNotFoundError:
      return None
    try:
      payload, in_tree, out_tree = pickle.loads(zlib.decompress(content))
      compiled = serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, backend=device.client, execution_devices=[device]
      )
    except Exception as error:  # Whatever a damaged file makes the readers raise.
      logging.warning("%s is compiled again: %s: %r", program.key, path, error)
      return None
    return compiled, content

  def _write(self, name: str, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
      file.write(content)
    pathlib.Path(file.name).replace(self._directory / name)


def _last_used(file: pathlib.Path) -> float:
  try:
    return file.stat().st_mtime
  except FileNotFoundError:  # another process has just pruned it
    return 0.0


def fingerprint(program: Program) -> str | None:
  """Equal for programs that compile to the same executable; None if that cannot be told.

  A function is told by its name, so a closure or a lambda cannot be; nor can arrays.
  """
  leaves, tree = jax.tree.flatten(program.args)
  try:
    parts = [
      _describe(part)
      for part in (program.key, program.fn, program.donate, program.compiler_options)
    ]
  except TypeError as error:
    logging.debug("%s has no fingerprint: %s", program.key, error)
    return None
  text = "\n".join([*parts, str(tree), repr(leaves), _code(), _surroundings(_device(program))])
  return _digest(text)


def _module_name(program: Program, lowered: jax.stages.Lowered) -> str:
  """By the module without its line numbers, so by what it computes."""
  device = _device(program)
  trees = str(lowered.in_tree), str(lowered.out_tree)
  options = sorted(program.compiler_options.items())
  return _digest(repr((lowered.as_text(), trees, options, device.id, _surroundings(device))))


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _device(program: Program) -> jax.Device:
  (device,) = jax.tree.leaves(program.args)[0].sharding.device_set
  return device


@functools.cache
def _surroundings(device: jax.Device) -> str:
  """What decides an executable besides the module: versions, options, machine."""
  options = {k: v for k, v in sorted(jax.config.values.items()) if isinstance(v, _PLAIN)}
  versions = jax.__version__, jaxlib.__version__, flax.__version__
  client = device.platform, device.device_kind, device.client.platform_version
  # XLA reads its flags from there, whoever set them.
  flags = os.environ.get("XLA_FLAGS", ""), os.environ.get("LIBTPU_INIT_ARGS", "")  # noqa: TID251
  return repr((versions, client, flags, options, _processor(), os.cpu_count()))


@functools.cache
def _code() -> str:
  """A digest of the source files of the packages that programs come from."""
  digest = hashlib.sha256()
  for package in (jaxserve, pallas_kernels):
    (root,) = package.__path__
    for file in sorted(pathlib.Path(root).rglob("*.py")):
      digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
  return digest.hexdigest()


def _processor() -> str:
  """The processor and its instruction sets, as far as the system tells."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    lines = []
  told = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
  return repr((platform.machine(), platform.processor(), sorted(told)))


def _describe(value: Any) -> str:
  """A text that differs where values differ.

  Raises:
    TypeError: there is none.
  """
  if isinstance(value, _PLAIN) or isinstance(value, enum.Enum):
    return repr(value)
  if isinstance(value, nnx.GraphDef):
    return _describe_graph(value)
  if isinstance(value, functools.partial):
    return f"{_describe(value.func)}({_describe(value.args)}, {_describe(value.keywords)})"
  if inspect.isfunction(value) and value.__closure__ is None and "<" not in value.__qualname__:
    return f"{value.__module__}.{value.__qualname__}"
  if isinstance(value, Mapping):
    return repr({_describe(k): _describe(v) for k, v in value.items()})
  if isinstance(value, tuple | list):
    return f"{type(value).__qualname__}({', '.join(map(_describe, value))})"
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = {f.name: _describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return f"{type(value).__qualname__}({fields})"
  raise TypeError(f"{type(value).__name__} cannot be told from others of its kind")


@functools.lru_cache(maxsize=4)
def _describe_graph(graph: nnx.GraphDef) -> str:
  return repr(graph)
