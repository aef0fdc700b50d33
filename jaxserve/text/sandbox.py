"""Where a chat template runs: jinja2's immutable sandbox, with what transformers adds to it.

A template comes with a checkpoint, so it is somebody else's code. The sandbox keeps it from private
attributes and from changing what it is given; the classes that jinja2 itself hands out, `namespace`
and `dict`, are replaced by ones that lead nowhere.
"""

import datetime
import json
from typing import Any

import jinja2
from jinja2 import ext, sandbox
from jinja2.utils import Namespace


class _Generation(ext.Extension):
  """{% generation %} marks the assistant's part for training; it prints what it holds."""

  tags = {"generation"}

  def parse(self, parser: Any) -> Any:
    """Of the block, its body."""
    lineno = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return jinja2.nodes.Scope(body).set_lineno(lineno)


class _Names(Namespace):
  """A namespace without the attributes that Python gives a meaning of its own."""

  def __init__(*args: Any, **given: Any) -> None:  # so that a name in it may be `self`
    self, rest = args[0], args[1:]
    names = dict(*rest, **given)
    for name in names:
      _check(name)
    Namespace.__init__(self, names)

  def __setitem__(self, name: str, value: Any) -> None:
    _check(name)
    super().__setitem__(name, value)


def _check(name: object) -> None:
  if isinstance(name, str) and name.startswith("_"):
    raise sandbox.SecurityError(f"{name!r}: a name in a namespace may not begin with _")


class _Dict:
  """`dict` without its class."""

  def __call__(self, *args: Any, **given: Any) -> dict[Any, Any]:
    """As `dict`."""
    return dict(*args, **given)

  def fromkeys(self, *args: Any) -> dict[Any, Any]:
    """As `dict.fromkeys`."""
    return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
  # Not jinja2's own: that escapes HTML, and models have not seen \u003c in training.
  return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def environment(now: datetime.datetime | None) -> sandbox.ImmutableSandboxedEnvironment:
  """A fresh one.

  Args:
    now: what templates that print the date take for the date; None: they are refused.
  """

  def strftime_now(pattern: str) -> str:
    if now is None:
      raise jinja2.TemplateError("it prints the date, which was not given")
    return now.strftime(pattern)

  made = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
  )
  made.filters["tojson"] = _to_json
  made.globals |= {
    "raise_exception": _raise_exception,
    "strftime_now": strftime_now,
    "namespace": _Names,
    "dict": _Dict(),
  }
  return made
