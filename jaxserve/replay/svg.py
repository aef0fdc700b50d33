"""Just enough SVG: elements as strings, scales, and axes."""

import dataclasses
import html
import math
from collections.abc import Callable, Iterable

Box = tuple[float, float, float, float]
"""Left, top, width, height."""


def _attribute(value: object) -> str:
  return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def element(tag: str, *children: str, **attributes: object) -> str:
  """An element. Children are markup; attribute values are escaped, `_` in their names becomes `-`.

  A trailing underscore is dropped, so that `class_` can be said.
  """
  words = (
    f' {name.rstrip("_").replace("_", "-")}="{html.escape(_attribute(value))}"'
    for name, value in attributes.items()
  )
  return f"<{tag}{''.join(words)}>{''.join(children)}</{tag}>"


def text(x: float, y: float, content: str, class_: str = "label", **attributes: object) -> str:
  """A line of text, escaped."""
  return element("text", html.escape(content), x=x, y=y, class_=class_, **attributes)


def title(content: str) -> str:
  """The tooltip of the element it is put in, escaped."""
  return element("title", html.escape(content))


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
  """A straight line."""
  return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def box(left: float, top: float, width: float, height: float, class_: str, tip: str = "") -> str:
  """A rectangle with an optional tooltip."""
  hint = title(tip) if tip else ""
  return element("rect", hint, x=left, y=top, width=width, height=height, class_=class_)


def boxes(places: Iterable[Box], class_: str) -> str:
  """Many rectangles as one path: small, but without tooltips. Flat ones are left out."""
  path = "".join(
    f"M{_attribute(x)} {_attribute(y)}h{_attribute(w)}v{_attribute(h)}h{_attribute(-w)}z"
    for x, y, w, h in places
    if h > 0
  )
  return element("path", d=path, class_=class_) if path else ""


@dataclasses.dataclass(frozen=True)
class Scale:
  """A map from data in [low, high] to pixels in [start, end], linear or logarithmic.

  Attributes:
    low: smallest value.
    high: largest value, above low.
    start: pixel of low.
    end: pixel of high.
    log: whether equal ratios, not differences, are equally far apart; needs low > 0.
  """

  low: float
  high: float
  start: float
  end: float
  log: bool = False

  def __call__(self, value: float) -> float:
    """The pixel of a value; values outside are put on the edge."""
    value = min(max(value, self.low), self.high)
    f = math.log if self.log else float
    share = (f(value) - f(self.low)) / (f(self.high) - f(self.low))
    return self.start + share * (self.end - self.start)

  def ticks(self, about: int = 6) -> list[float]:
    """Round values in range: multiples of 1, 2 or 5 times a power of ten, or those themselves."""
    return _log_ticks(self) if self.log else _linear_ticks(self, about)


def _linear_ticks(scale: Scale, about: int) -> list[float]:
  rough = (scale.high - scale.low) / about
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
  first, last = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
  return [i * step for i in range(first, last + 1)]


def _log_ticks(scale: Scale) -> list[float]:
  low, high = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
  digits = (1, 2, 5) if math.log10(scale.high / scale.low) <= 3 else (1,)
  values = (digit * 10.0**power for power in range(low, high + 1) for digit in digits)
  return [v for v in values if scale.low * (1 - 1e-9) <= v <= scale.high * (1 + 1e-9)]


def x_axis(scale: Scale, top: float, bottom: float, label: str) -> str:
  """Faint verticals from top to bottom, numbers and a label beneath."""
  parts = []
  for tick in scale.ticks(10):
    parts.append(line(scale(tick), top, scale(tick), bottom, "grid"))
    parts.append(text(scale(tick), bottom + 16, f"{tick:,.10g}", "tick", text_anchor="middle"))
  middle = (scale.start + scale.end) / 2
  return "".join(parts) + text(middle, bottom + 36, label, "label", text_anchor="middle")


def y_axis(
  scale: Scale,
  left: float,
  right: float,
  label: str,
  show: Callable[[float], str] = "{:,.10g}".format,
  about: int = 4,
) -> str:
  """Faint horizontals from left to right, numbers and a rotated label beside them."""
  parts = []
  for tick in scale.ticks(about):
    parts.append(line(left, scale(tick), right, scale(tick), "grid"))
    parts.append(text(left - 8, scale(tick) + 4, show(tick), "tick", text_anchor="end"))
  middle = (scale.start + scale.end) / 2
  turn = f"rotate(-90 {_attribute(left - 58)} {_attribute(middle)})"
  return "".join(parts) + text(
    left - 58, middle, label, "label", text_anchor="middle", transform=turn
  )


def standalone(drawing: str, style: str) -> str:
  """A `picture` as a file of its own, with its style sheet inside."""
  namespace = '<svg xmlns="http://www.w3.org/2000/svg"'
  head, body = drawing.replace("<svg", namespace, 1).split(">", 1)
  return f"{head}>{element('style', style)}{body}\n"


def picture(width: float, height: float, description: str, *children: str) -> str:
  """The whole drawing: scales with the page, and says what it shows to who cannot see it."""
  return element(
    "svg",
    *children,
    viewBox=f"0 0 {_attribute(width)} {_attribute(height)}",
    role="img",
    aria_label=description,
  )
