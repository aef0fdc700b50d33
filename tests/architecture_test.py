"""The shape of the code itself: layers, cycles, sizes, and mistakes that no linter knows.

Every rule is a function from source (or an import graph) to a list of violations. One test applies
it to the repository, another plants a violation and checks that the rule sees it.
"""

import ast
import pathlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Set

import grimp
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("jaxserve", "pallas_kernels", "experiments", "tests")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150

PURE_NAMES = (
  "sched",
  "cache",
  "types",
  "cost",
  "cost_tables",
  "cost_profile",
  "solve",
  "sim",
  "workload",
  "config",
)
PURE = tuple(f"jaxserve/{name}/" for name in PURE_NAMES)
IMPURE_MODULES = frozenset({"flax", "time", "random", "os"})


def _sources() -> list[str]:
  files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
  return sorted(path.relative_to(ROOT).as_posix() for path in files)


def _imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
  """Line and dotted name of every import; `from a import b` counts as a.b."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
      yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def long_file(path: str, source: str) -> list[str]:
  """Files over the maximum."""
  count = len(source.splitlines())
  return [f"{path}: {count} lines"] if count > MAX_FILE_LINES else []


def _length_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
  count = (function.end_lineno or function.lineno) - function.lineno + 1
  if ast.get_docstring(function, clean=False) is None:
    return count
  doc = function.body[0]
  return count - ((doc.end_lineno or doc.lineno) - doc.lineno + 1)


def long_functions(path: str, source: str) -> list[str]:
  """Functions over the maximum, docstrings not counted. Kernel bodies may be longer."""
  file = pathlib.PurePosixPath(path)
  is_kernel = file.parts[0] == "pallas_kernels" and file.name == "mosaic_gpu.py"
  limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
  return [
    f"{path}:{node.lineno}: {node.name} has {length} lines"
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if (length := _length_without_docstring(node)) > limit
  ]


def _is_at_update(node: ast.expr) -> bool:
  """Whether an expression is `x.at[i]`, or a chain of calls and attributes upon one."""
  while True:
    match node:
      case ast.Subscript(value=ast.Attribute(attr="at")):
        return True
      case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
        node = inner
      case _:
        return False


def discarded_updates(path: str, source: str) -> list[str]:
  """Statements like `x.at[i].set(v)`, whose result is lost."""
  return [
    f"{path}:{node.lineno}: the result of `{ast.unparse(node)}` is discarded"
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Expr) and _is_at_update(node.value)
  ]


def _may_parse_flags(path: str) -> bool:
  file = pathlib.PurePosixPath(path)
  return path == "jaxserve/main.py" or file.match("experiments/*/__main__.py")


def stray_flags(path: str, source: str) -> list[str]:
  """Imports of absl.flags outside a program's main module."""
  if _may_parse_flags(path):
    return []
  return [
    f"{path}:{line}: imports {name}"
    for line, name in _imported(ast.parse(source))
    if name == "absl.flags" or name.startswith("absl.flags.")
  ]


def impure_imports(path: str, source: str) -> list[str]:
  """Imports of a clock, randomness, the environment or Flax in code that may not depend on them."""
  if not f"{path.removesuffix('.py')}/".startswith(PURE):
    return []
  return [
    f"{path}:{line}: imports {name}"
    for line, name in _imported(ast.parse(source))
    if name.split(".")[0] in IMPURE_MODULES
  ]


def import_cycle(graph: Mapping[str, Set[str]]) -> list[str]:
  """One cycle of the graph as a path that ends where it began, or [] if there is none."""
  done: set[str] = set()
  path: list[str] = []

  def visit(module: str) -> list[str]:
    if module in path:
      return [*path[path.index(module) :], module]
    if module in done:
      return []
    path.append(module)
    for target in sorted(graph.get(module, ())):
      if cycle := visit(target):
        return cycle
    done.add(path.pop())
    return []

  return next((cycle for module in sorted(graph) if (cycle := visit(module))), [])


RULES = (long_file, long_functions, discarded_updates, stray_flags, impure_imports)
RULE_IDS = [rule.__name__ for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=RULE_IDS)
def test_repository_keeps_the_rule(rule):
  violations = [v for path in _sources() for v in rule(path, (ROOT / path).read_text("utf-8"))]
  assert not violations, "\n".join(violations)


def _function_of(lines: int, docstring: int = 0) -> str:
  doc = '  """Does.\n' + "  more\n" * (docstring - 2) + '  """\n' if docstring else ""
  return "def f():\n" + doc + "  pass\n" * (lines - 1)


KERNEL = "pallas_kernels/attention/mosaic_gpu.py"
PLANTED = [
  (long_file, "jaxserve/a.py", "pass\n" * (MAX_FILE_LINES + 1)),
  (long_functions, "jaxserve/a.py", _function_of(MAX_FUNCTION_LINES + 1)),
  (long_functions, "pallas_kernels/attention/xla.py", _function_of(MAX_FUNCTION_LINES + 1)),
  (long_functions, KERNEL, _function_of(MAX_KERNEL_LINES + 1)),
  (discarded_updates, "tests/a_test.py", "x.at[0].set(1)"),
  (discarded_updates, "tests/a_test.py", "def f(s):\n  s.x.at[0, 1:].add(1, mode='drop').block()"),
  (stray_flags, "jaxserve/engine/a.py", "from absl import flags"),
  (stray_flags, "experiments/speed/run.py", "import absl.flags as f"),
  (stray_flags, "tests/a_test.py", "def f():\n  from absl.flags import FLAGS"),
  (impure_imports, "jaxserve/cost.py", "import random"),
  (impure_imports, "jaxserve/sched/step.py", "from time import monotonic"),
  (impure_imports, "jaxserve/cache/pool.py", "def f():\n  import os.path"),
  (impure_imports, "jaxserve/types/plan.py", "from flax import nnx"),
]
ALLOWED = [
  (long_file, "jaxserve/a.py", "pass\n" * MAX_FILE_LINES),
  (long_functions, "jaxserve/a.py", _function_of(MAX_FUNCTION_LINES, docstring=9)),
  (long_functions, KERNEL, _function_of(MAX_KERNEL_LINES)),
  (discarded_updates, "jaxserve/a.py", "y = x.at[0].set(1)\ncopy(ref.at[0])\nx.attend[0].set(1)"),
  (stray_flags, "jaxserve/main.py", "from absl import flags"),
  (stray_flags, "experiments/speed/__main__.py", "from absl import flags"),
  (stray_flags, "jaxserve/engine/a.py", "from absl import logging"),
  (impure_imports, "jaxserve/engine/clock.py", "import time"),
  (impure_imports, "jaxserve/cost_report.py", "import time"),
  (impure_imports, "jaxserve/sched/step.py", "from jax import random"),
]


@pytest.mark.parametrize(("rule", "path", "source"), PLANTED)
def test_rule_sees_a_planted_violation(rule, path, source):
  assert len(rule(path, source)) == 1


@pytest.mark.parametrize(("rule", "path", "source"), ALLOWED)
def test_rule_allows_the_neighbouring_case(rule, path, source):
  assert rule(path, source) == []


def test_every_rule_has_a_planted_violation():
  assert {rule for rule, _, _ in PLANTED} == set(RULES)


def test_every_folder_of_sources_is_a_package():
  folders = {(ROOT / path).parent for path in _sources()}
  assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_imports_have_no_cycle():
  graph = grimp.build_graph("jaxserve", "pallas_kernels", "experiments", cache_dir=None)
  imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
  assert "jaxserve.config" in imports["jaxserve.types.plan"]
  assert not import_cycle(imports)


def test_import_cycle_is_seen():
  graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}
  assert import_cycle(graph) == ["b", "c", "b"]
  assert import_cycle(graph | {"c": {"d"}}) == []


def _lint_imports(directory: pathlib.Path) -> subprocess.CompletedProcess[str]:
  script = "import sys, importlinter.cli as c; sys.exit(c.lint_imports(no_cache=True))"
  command = [sys.executable, "-c", script]
  return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_layer_contracts_hold():
  done = _lint_imports(ROOT)
  assert done.returncode == 0, done.stdout + done.stderr


def _empty_skeleton(directory: pathlib.Path) -> None:
  """Lays down the contract, and an empty module for every name that it mentions."""
  config = (ROOT / "pyproject.toml").read_text("utf-8")
  (directory / "pyproject.toml").write_text(config, "utf-8")
  contracts = tomllib.loads(config)["tool"]["importlinter"]["contracts"]
  names = " ".join(" ".join(c.get("layers", []) + c.get("source_modules", [])) for c in contracts)
  for name in names.replace("|", " ").replace("(", " ").replace(")", " ").split():
    package = directory / name.replace(".", "/")
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
  (directory / "jaxserve" / "__init__.py").touch()


@pytest.mark.parametrize(
  ("module", "line"),
  [
    pytest.param("", "", id="clean"),
    pytest.param("jaxserve/types", "import jaxserve.engine", id="upward"),
    pytest.param("jaxserve/sched", "import jaxserve.model", id="sibling"),
    pytest.param("jaxserve/sched", "import time", id="clock"),
    pytest.param("pallas_kernels", "import jaxserve.config", id="kernel"),
  ],
)
def test_layer_contracts_see_a_planted_violation(tmp_path, module, line):
  _empty_skeleton(tmp_path)
  if module:
    (tmp_path / module / "planted.py").write_text(line, "utf-8")
  done = _lint_imports(tmp_path)
  assert done.returncode == (1 if module else 0), done.stdout + done.stderr
  assert not module or "planted" in done.stdout
