"""A worker of experiments.peers without an engine: every request gets a token a step.

The variable FAKE says what goes wrong: "no_load", "no_serve", "dies" or "hangs" (both at serving).
"""

import os
import pathlib
import sys
import time

_ADAPTERS = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "peers" / "adapters"
sys.path.insert(0, str(_ADAPTERS))
import protocol  # noqa: E402


class Fake:
  def load(self, model, options):
    print("noise that is no answer")
    if os.environ.get("FAKE") == "no_load":
      raise MemoryError("no room")
    self._left, self._chunk = {}, None
    versions = {"fake": "1"}
    return {"versions": versions, "model": model, "kv_bytes_per_token": 4, **options}

  def set_chunk(self, chunk):
    self._chunk = chunk

  def submit(self, key, prompt, tokens):
    trouble = os.environ.get("FAKE")
    if trouble == "no_serve":
      raise ValueError("cannot serve")
    if trouble == "dies":
      print("last words", file=sys.stderr, flush=True)
      os._exit(3)
    if trouble == "hangs":
      time.sleep(60)
    self._left[key] = [sum(prompt), tokens]

  def step(self):
    time.sleep(0.0005)
    found = []
    for key, entry in list(self._left.items()):
      entry[0], entry[1] = entry[0] + 1, entry[1] - 1
      found.append((key, [entry[0] % 97]))
      if not entry[1]:
        del self._left[key]
    return found


if __name__ == "__main__":
  protocol.main(Fake())
