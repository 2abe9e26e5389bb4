"""Claims about curves."""

import math
from xml.etree import ElementTree

import pytest

from harness.plots import MAX_POINTS, figure_svg, thin


@pytest.mark.parametrize("place", [0, 1, 4999, 5000, 9998, 9999])
def test_thinning_keeps_every_peak(place):
    y = [1.0] * 10_000
    y[place] = 50.0
    x, thinned = thin(list(range(10_000)), y)
    assert len(x) <= MAX_POINTS
    assert (place, 50.0) in zip(x, thinned, strict=True)
    assert x == sorted(x)


@pytest.mark.parametrize("y", [[math.nan] * 3, [math.inf, 1.0, -math.inf], [1e-9, 1.0, 1e9], [5.0]])
def test_any_curve_can_be_drawn(y):
    x = list(range(len(y)))
    svg = figure_svg([{"name": "_c", "x": x, "y": y, "x_label": "x", "y_label": "y"}], "p")
    root = ElementTree.fromstring(svg.replace("xlink:", ""))
    assert root.attrib["role"] == "img"
