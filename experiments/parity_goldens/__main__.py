"""Writes the golden checkpoints and chat texts; see README.md."""

import json
import tempfile
from pathlib import Path

from absl import app, flags, logging

from experiments.parity_goldens import chats, families

_OUT = flags.DEFINE_string("out", "tests/golden", "Directory to write to.")
_MAX_BYTES = 60_000


def main(argv: list[str]) -> None:
  del argv
  out = Path(_OUT.value)
  for name in families.FAMILIES:
    folder = out / "families" / name
    with tempfile.TemporaryDirectory() as scratch:
      families.write(name, folder, Path(scratch))
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > _MAX_BYTES:
      raise ValueError(f"{folder} has {size} bytes; keep it under {_MAX_BYTES}")
    logging.info("%s: %d bytes", folder, size)
  text = json.dumps(chats.rendered(), ensure_ascii=False, indent=1)
  (out / "chats.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  app.run(main)
