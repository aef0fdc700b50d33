"""The programs of docs/tutorial.md run as printed, in one process, and say what the text says."""

import contextlib
import io
import pathlib
import re

import pytest

from tests.testing.engines import shared_store

pytestmark = pytest.mark.one_leg

TUTORIAL = (pathlib.Path(__file__).parent.parent / "docs" / "tutorial.md").read_text("utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", TUTORIAL, flags=re.DOTALL)


def test_programs_run_in_order():
  names, printed = {"STORE": shared_store()}, []
  # Shorter than in the text, and with what other tests have compiled.
  for number, program in enumerate(PROGRAMS):
    program = program.replace("count, long_every = 120, 8", "count, long_every = 30, 8")
    program = program.replace("build(config, *weights)", "build(config, *weights, store=STORE)")
    program = program.replace("devices.set_up()", "pass")  # the tests have done it
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      exec(compile(program, f"tutorial.md, program {number + 1}", "exec"), names)  # noqa: S102
    printed.append(out.getvalue())
  assert len(printed) == 6
  steps = [line.split() for line in printed[0].splitlines()]
  chunks = [int(prompt) for _, _, prompt in steps if prompt not in ("-", "0")]
  assert chunks == [504] * 7 + [472]
  assert max(int(tokens) for _, tokens, _ in steps) == 512
  assert set(names["results"]) == {
    (policy, budget) for policy in ("vllm_v1", "fair") for budget in (256, 512, 1024, 2048)
  }
  assert "'r2': 32" in printed[4]
  assert "step 1" in printed[5] or "step 0" in printed[5]
