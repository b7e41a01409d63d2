"""Pictures of the benchmarks."""

from xml.etree import ElementTree

import pytest

SPACE = {"svg": "http://www.w3.org/2000/svg"}


@pytest.fixture(scope="module")
def curves(load_benchmark):
    return load_benchmark("curves")


def heights(picture):
    """Of the points of each curve."""
    lines = ElementTree.fromstring(picture).findall("svg:polyline", SPACE)
    return [[float(point.split(",")[1]) for point in line.get("points").split()] for line in lines]


@pytest.mark.parametrize("is_log", [False, True])
def test_larger_values_stand_higher_and_inside(curves, is_log):
    low, high = curves.Curve("a", [(0, 3), (1, 40)]), curves.Curve("b & c", [(0, 3.5), (1, 250)])
    first, second = heights(curves.draw("t", [low, high], {0: "x"}, is_log=is_log))
    assert first[0] > second[0] > first[1] > second[1]
    assert 40 < second[1] < first[0] < 360


def test_a_step_of_a_logarithm_is_the_same_everywhere(curves):
    (points,) = heights(curves.draw("t", [curves.Curve("a", [(0, 1), (1, 10), (2, 100)])], {}, is_log=True))
    assert points[0] - points[1] == pytest.approx(points[1] - points[2], abs=0.2)


def test_curves_of_nothing_but_zeros_can_be_drawn(curves):
    assert heights(curves.draw("t", [curves.Curve("a", [(1, 0.0), (2, 0.0)])], {1: "1"})) == [[360.0, 360.0]]
