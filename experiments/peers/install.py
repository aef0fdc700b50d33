"""Environments of the peers, outside the repository; one that is complete is used again."""

import json
import pathlib
import shutil
import subprocess
import sys

from absl import logging

_TAIL = 300  # characters of an installer's complaint that are told


class Unavailable(Exception):
  """A peer cannot be used here; the text says why."""


def prepare(peer, peers_dir, given=None):
  """The folder of the peer's environment, made if it is not there.

  Args:
    peer: a `config.Peer`.
    peers_dir: where environments are.
    given: an environment that exists and is used as it is.

  Raises:
    Unavailable: it cannot be installed.
  """
  if given:
    folder = pathlib.Path(given).expanduser()
    if not interpreter(peer, folder).exists():
      raise Unavailable(f"{interpreter(peer, folder)} does not exist")
    return folder
  folder = pathlib.Path(peers_dir).expanduser() / "envs" / peer.name
  stamp, wanted = folder / "installed.json", [*peer.requires, *peer.unwanted]
  if stamp.exists() and json.loads(stamp.read_text()) == wanted:
    return folder
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  logging.info("Installing %s into %s", peer.title, folder)
  (_by_npm if peer.by_npm else _by_pip)(peer, folder)
  stamp.write_text(json.dumps(wanted))
  return folder


def interpreter(peer, folder):
  """The program that runs a peer's worker."""
  if peer.by_npm:
    return pathlib.Path(shutil.which("node") or folder / "node")
  return folder / "bin" / "python"


def _by_pip(peer, folder):
  _run([sys.executable, "-m", "venv", folder], folder)
  pip = [interpreter(peer, folder), "-m", "pip", "--disable-pip-version-check"]
  _run([*pip, "install", "--no-cache-dir", "--quiet", *peer.requires], folder)
  if peer.unwanted:
    _run([*pip, "uninstall", "--yes", "--quiet", *peer.unwanted], folder)


def _by_npm(peer, folder):
  if not shutil.which("npm") or not shutil.which("node"):
    raise Unavailable("npm and node are not on the path")
  (folder / "package.json").write_text('{"private": true}\n')
  # Without scripts: they would try to build llama.cpp; the prebuilt libraries are packages.
  options = ["--save-exact", "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund"]
  _run(["npm", "install", *options, *peer.requires], folder)


def _run(command, folder):
  """Raises Unavailable with the end of what the command printed, and clears the folder."""
  done = subprocess.run(
    [*map(str, command)], capture_output=True, text=True, check=False, cwd=folder
  )
  if done.returncode:
    shutil.rmtree(folder, ignore_errors=True)
    said = (done.stderr or done.stdout).strip()[-_TAIL:]
    raise Unavailable(f"{' '.join(map(str, command[:4]))} ended with {done.returncode}: {said}")
