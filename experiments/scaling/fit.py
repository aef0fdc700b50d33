"""Whether a series is flat, linear, or grows without need."""

import numpy as np

from experiments.scaling.config import FLAT

TOLERANCE = 1.25  # growth over a whole series that counts as none
STEEPER = 1.5  # the slope of the last stretch over that of all


def judge(x, y, expected):
  """Slope, growth and verdict of one series.

  Args:
    x: rising.
    y: what it costs, in one unit.
    expected: FLAT, or LINEAR, which is "no more than".

  Returns:
    A mapping: `growth`, last over first; `x_growth`; `slope`, of the straight line that fits best;
    `at_zero`, where that begins; `exponent` of the power law that fits best; `verdict`.
  """
  x, y = np.asarray(x, float), np.asarray(y, float)
  slope, at_zero = np.polyfit(x, y, 1)
  exponent = np.polyfit(np.log(x), np.log(y), 1)[0]
  growth, x_growth = y[-1] / y[0], x[-1] / x[0]
  whole = (y[-1] - y[0]) / (x[-1] - x[0])
  steepens = len(x) > 2 and (y[-1] - y[-2]) / (x[-1] - x[-2]) > STEEPER * whole
  if growth <= TOLERANCE:
    verdict = "flat"
  elif expected == FLAT or steepens or growth > TOLERANCE * x_growth:
    verdict = "grows without need"
  else:
    verdict = "linear"
  return {
    "growth": growth, "x_growth": x_growth, "slope": slope, "at_zero": at_zero,
    "exponent": exponent, "verdict": verdict,
  }  # fmt: skip
