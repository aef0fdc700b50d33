"""The inter-token gap against the budget: what a full chunk takes, the target, and both budgets."""

from jaxserve import cost, solve
from jaxserve.replay import svg

WIDTH, HEIGHT = 900.0, 520.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 186.0, 66.0, 64.0
POINTS = 240

# Colours after Okabe and Ito; curves also differ by their dashes and are named beside their end.
STYLE = """
svg { background: #fff; font-variant-numeric: tabular-nums; }
svg text { font: 13px system-ui, sans-serif; fill: #1c1e21; }
svg .tick, svg .label, svg .ridge-name { fill: #5c6370; } svg .heading { font: 600 16px system-ui; }
.grid { stroke: #e6e8ec; } path { fill: none; stroke-width: 2; }
.worst { stroke: #0072b2; } svg text.worst-name { fill: #0072b2; font-weight: 600; }
.first { stroke: #b35900; stroke-dasharray: 9 4; } svg text.first-name { fill: #b35900; }
.gemm { stroke: #555b66; stroke-dasharray: 2 4; } svg text.gemm-name { fill: #555b66; }
.target { stroke: #1c1e21; stroke-width: 1.5; stroke-dasharray: 6 4; }
.ridge { stroke: #a0a7b2; stroke-width: 1.2; } .drop { stroke: #a0a7b2; stroke-dasharray: 2 3; }
.honest { fill: #0072b2; stroke: #fff; stroke-width: 1.5; }
svg .mark, svg .ridge-name { paint-order: stroke; stroke: #fff; stroke-width: 4px; }
.rule { fill: #fff; stroke: #1c1e21; stroke-width: 2; }
"""


def draw(model, hardware, case, solution, title):
  """The whole figure.

  Args:
    model: cost of the model.
    hardware: it runs on.
    case: what was solved.
    solution: of it, feasible.
    title: first line.

  Returns:
    a standalone SVG file.
  """
  least = case.decoders + 1
  widest = int(1.3 * max(solution.gemm_only, solution.budget + case.page_size, least + 1))
  widest = min(widest, 4 * solution.budget)  # the rule's budget may be far off
  budgets = sorted({
    round(least + (widest - least) * i / (POINTS - 1)) for i in range(POINTS)
  })  # fmt: skip
  predicted = [solve.predict(model, hardware, case, budget) for budget in budgets]
  curves = {
    "worst": [1e3 * p.itl for p in predicted],
    "first": [1e3 * p.first_itl for p in predicted],
    "gemm": [1e3 * rule_of_thumb(model, hardware, solution, budget) for budget in budgets],
  }
  highest = 1.08 * max(curves["worst"][-1], 1.2e3 * case.itl)
  x = svg.Scale(0, widest, LEFT, WIDTH - RIGHT)
  y = svg.Scale(0, highest, HEIGHT - BOTTOM, TOP)
  return svg.standalone(
    svg.picture(
      WIDTH, HEIGHT, title,
      svg.text(LEFT, 26, title, "heading"),
      svg.x_axis(x, TOP, HEIGHT - BOTTOM, "token budget of a step (tokens)"),
      svg.y_axis(y, LEFT, WIDTH - RIGHT, "inter-token gap of the decodes (ms)", about=6),
      _ridge(x, solution),
      *(_curve(name, budgets, values, x, y) for name, values in curves.items()),
      _names(curves, case, x, y),
      _target(case, x, y),
      _marks(model, hardware, solution, x, y),
    ),
    STYLE,
  )  # fmt: skip


def rule_of_thumb(model, hardware, solution, budget):
  """Seconds of a step by the GEMM-only rule: the decode step and the weight multiplications."""
  return solution.decode + cost.gemm_flops(model, budget) / hardware.flops


def _curve(name, budgets, values, x, y):
  points = " L".join(f"{x(b):.2f} {y(v):.2f}" for b, v in zip(budgets, values, strict=True))
  return svg.element("path", d=f"M{points}", class_=name)


def _names(curves, case, x, y):
  """Names beside the right ends of the curves, moved apart where they would overlap."""
  lines = {
    "worst": ("full chunk after a prefix", f"of {case.max_prefix:,} tokens"),
    "gemm": ("GEMM-only rule:", "decode step + products"),
    "first": ("first full chunk", "(no prefix)"),
  }
  parts, lowest = [], None
  for name in sorted(lines, key=lambda n: -curves[n][-1]):
    at = y(curves[name][-1]) - 2
    at = at if lowest is None else max(at, lowest + 40)
    lowest = at
    for i, words in enumerate(lines[name]):
      parts.append(svg.text(x.end + 8, at + 16 * i, words, f"{name}-name"))
  return "".join(parts)


def _target(case, x, y):
  at = y(1e3 * case.itl)
  words = f"target {1e3 * case.itl:g} ms"
  return svg.line(x.start, at, x.end, at, "target") + svg.text(x.start + 8, at - 8, words, "mark")


def _ridge(x, solution):
  if solution.ridge_tokens > x.high:
    return ""
  at = x(solution.ridge_tokens)
  side = (5, "start") if at < (x.start + x.end) / 2 else (-5, "end")
  words = f"ridge point, {solution.ridge_tokens:.0f} tokens"
  return svg.line(at, TOP, at, HEIGHT - BOTTOM, "ridge") + svg.text(
    at + side[0], TOP + 12, words, "ridge-name", text_anchor=side[1]
  )


def _marks(model, hardware, solution, x, y):
  """Both budgets: a filled dot where the honest one is, rings where the rule's is and really is."""
  parts, bottom = [], HEIGHT - BOTTOM
  budget, rule = solution.budget, solution.gemm_only
  honest = 1e3 * solution.at_budget.itl
  parts.append(svg.line(x(budget), y(honest), x(budget), bottom, "drop"))
  parts.append(svg.element("circle", cx=x(budget), cy=y(honest), r=6.0, class_="honest"))
  words, room = f"{budget:,} tokens: {honest:.1f} ms", x(budget) - x.start > 250
  place = (-8, -14, "end") if room else (10, 20, "start")  # clear of the target's name
  parts.append(
    svg.text(x(budget) + place[0], y(honest) + place[1], words, "mark", text_anchor=place[2])
  )
  if rule > x.high:
    words = f"the GEMM-only rule says {rule:,}, off to the right"
    parts.append(svg.text(x.end - 8, bottom - 10, words, "mark", text_anchor="end"))
  elif rule:
    believed = 1e3 * rule_of_thumb(model, hardware, solution, rule)
    real = 1e3 * solution.at_gemm_only.itl
    parts.append(svg.line(x(rule), y(real), x(rule), bottom, "drop"))
    for value in (believed, real):
      parts.append(svg.element("circle", cx=x(rule), cy=y(value), r=5.0, class_="rule"))
    words = f"{rule:,} by the rule: {real:.0f} ms"
    place = (-12, -8, "end") if rule > budget else (8, 26, "start")
    parts.append(
      svg.text(x(rule) + place[0], y(real) + place[1], words, "mark", text_anchor=place[2])
    )
  return "".join(parts)
