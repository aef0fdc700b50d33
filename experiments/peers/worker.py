"""The driver's end of the line protocol: a process that answers one message at a time."""

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading

from experiments.peers import config, install

_ADAPTERS = pathlib.Path(__file__).with_name("adapters")
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LOAD_TIMEOUT_S = 900.0
_LOG_TAIL = 400  # characters of a dead worker's log that are told


class WorkerError(RuntimeError):
  """A worker answered with an error, or not at all."""


class Worker:
  """One engine in a process of its own.

  Args:
    command: of the process.
    environment: of the process, all of it.
    log: file that its stderr is appended to.
    timeout_s: of one answer, loading left out.
  """

  def __init__(self, command, environment, log, timeout_s):
    self._timeout_s, self._log = timeout_s, pathlib.Path(log)
    self._log.parent.mkdir(parents=True, exist_ok=True)
    with self._log.open("ab") as stderr:
      self._process = subprocess.Popen(
        [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
        env=environment, text=True, cwd=self._log.parent,
      )  # fmt: skip
    self._lines = queue.SimpleQueue()
    threading.Thread(target=self._listen, daemon=True).start()

  def ask(self, op, **message):
    """The answer to a message; raises WorkerError."""
    try:
      self._process.stdin.write(json.dumps({"op": op, **message}) + "\n")
      self._process.stdin.flush()
      timeout_s = _LOAD_TIMEOUT_S if op == "load" else self._timeout_s
      line = self._lines.get(timeout=timeout_s)
    except queue.Empty:
      self.close(at_once=True)
      raise WorkerError(f"no answer to {op} in {timeout_s:g} s") from None
    except OSError:
      line = None
    if line is None:
      self.close(at_once=True)
      raise WorkerError(f"ended at {op}: {self._last_words()}")
    answer = json.loads(line)
    if "error" in answer:
      raise WorkerError(answer["error"])
    return answer

  @property
  def alive(self):
    return self._process.poll() is None

  def peak_mb(self):
    """Most resident memory so far, in 10^6 bytes; None where the kernel does not tell."""
    try:
      lines = pathlib.Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
      return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
      return None

  def close(self, at_once=False):
    """Ends the process; it has some seconds to do so itself, unless `at_once`."""
    if self.alive and not at_once:
      try:
        self._process.communicate(json.dumps({"op": "quit"}) + "\n", timeout=10)
      except (subprocess.TimeoutExpired, ValueError, OSError):
        pass
    if self.alive:
      self._process.kill()
    self._process.wait()

  def _listen(self):
    for line in self._process.stdout:
      self._lines.put(line)
    self._lines.put(None)

  def _last_words(self):
    return self._log.read_text("utf-8", "replace").strip()[-_LOG_TAIL:]


def start(peer, folder, log, cache, timeout_s):
  """The worker of a peer, or ours.

  Args:
    peer: a `config.Peer`.
    folder: its environment; None for ours.
    log: file of its stderr.
    cache: folder for what it compiles.
    timeout_s: of one answer.
  """
  program = install.interpreter(peer, folder) if folder else sys.executable
  command = [program, _ADAPTERS / peer.worker]
  return Worker(command, _environment(peer, folder, pathlib.Path(cache)), log, timeout_s)


def _environment(peer, folder, cache):
  kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
  kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **dict(peer.environment)}
  kept.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # vLLM serves with one unless told.
  kept |= {"VLLM_CACHE_ROOT": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
  if peer.name == config.US:
    kept |= {"PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}
  if peer.by_npm:
    kept["PEER_MODULES"] = str(folder)
  if peer.preload and folder and (pathlib.Path(folder) / peer.preload).exists():
    kept["LD_PRELOAD"] = str(pathlib.Path(folder) / peer.preload)
  return kept
