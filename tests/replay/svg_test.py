import itertools
from xml.etree import ElementTree

import pytest

from jaxserve.replay import svg


def test_element_escapes_values_and_text_but_not_children():
  markup = svg.element("g", svg.text(1, 2.5, "a<b & c"), aria_label='say "<hi>"', class_="x")
  group = ElementTree.fromstring(markup)
  assert group.attrib == {"aria-label": 'say "<hi>"', "class": "x"}
  assert group[0].text == "a<b & c" and group[0].get("y") == "2.5"


def test_boxes_are_one_path_without_flat_ones():
  path = ElementTree.fromstring(svg.boxes([(1, 2, 3, 4), (5, 6, 7, 0)], "decode"))
  assert path.get("d") == "M1 2h3v4h-3z"
  assert svg.boxes([(0, 0, 1, 0)], "decode") == ""


@pytest.mark.parametrize("log", [False, True])
def test_scale_maps_ends_to_ends_and_clips(log):
  scale = svg.Scale(1.0, 100.0, 200.0, 0.0, log=log)
  assert scale(1) == 200 and scale(100) == 0
  assert scale(0.1) == 200 and scale(1e9) == 0
  assert scale(10) == pytest.approx(100 if log else 200 - 200 * 9 / 99)


@pytest.mark.parametrize("high", [0.03, 1.0, 7.7, 256.0, 8192 * 1.1])
def test_linear_ticks_are_few_round_and_even(high):
  ticks = svg.Scale(0.0, high, 0.0, 1.0).ticks(5)
  assert 2 <= len(ticks) <= 6 and ticks[0] == 0 and ticks[-1] <= high * (1 + 1e-6)
  steps = {round(b - a, 9) for a, b in itertools.pairwise(ticks)}
  assert len(steps) == 1


def test_log_ticks():
  assert svg.Scale(20.0, 600.0, 0, 1, log=True).ticks() == [20, 50, 100, 200, 500]
  assert svg.Scale(1.0, 20000.0, 0, 1, log=True).ticks() == [1, 10, 100, 1000, 10000]
