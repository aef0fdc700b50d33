"""The README's programs run as printed, and it stays short."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.testing.caches import cache_dir

pytestmark = pytest.mark.one_leg

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program_runs(number):
  code = PROGRAMS[number].replace("~/.cache/jaxserve", str(cache_dir()))
  command = [sys.executable, "-c", code]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip()
  if "vmap" in code:  # 4 budgets, 20 steps, no step above its budget, chunks as its policy says
    rows = done.stdout.replace("[", " ").replace("]", " ").split()
    tokens = [int(x) for x in rows]
    assert len(tokens) == 80 and max(tokens) == 2048 and max(tokens[:20]) == 256
    assert set(tokens[1:20]) == {8 + 256 // 3}


def test_readme_is_short_and_has_programs():
  assert len(README.splitlines()) <= 150 and len(PROGRAMS) == 2
