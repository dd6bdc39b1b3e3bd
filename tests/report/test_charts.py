"""Memory against time: every point lies within the axes, whose ticks are round."""

import re

import pytest

from aottrain.report.charts import Mark, area_plot, memory_plot

POLYGON = re.compile(r'<polygon class="c\d" points="([^"]+)"')
MIB, GIB = 1024.0**2, 1024.0**3
POINTS = {
    "far apart": [(22 * MIB, 0.05), (900 * MIB, 3.0)],
    "close": [(1.50 * GIB, 0.1), (1.51 * GIB, 0.101)],
    "one": [(80 * GIB, 12.0)],
    "little": [(1024.0, 0.0)],
}


@pytest.mark.parametrize("name", POINTS)
def test_points_lie_within_the_axes(name):
    places = POINTS[name]
    marks = [Mark("<ours>", "<a>", "<b>", *place) for place in places]
    drawn = memory_plot(marks, places, axes=("peak", "step"))
    x_grid = [float(x) for x in re.findall(r'<line class="grid" x1="([\d.]+)" y1="20.0"', drawn)]
    assert 3 <= len(x_grid) <= 11  # with the uppermost line across
    circles = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn)
    assert len(circles) == len(places)
    assert all(min(x_grid) <= float(x) <= max(x_grid) and 20 <= float(y) <= 400 for x, y in circles)
    ticks = re.findall(r'text-anchor="middle">([^<]*)<', drawn)
    assert len(set(ticks)) == len(ticks)
    assert all(f"&lt;{name}&gt;" in drawn and f"<{name}>" not in drawn for name in ("ours", "a", "b"))


def test_labels_cover_neither_marks_nor_each_other():
    marks = [Mark("a" if i % 2 else "b", f"run {i}", f"0.{i}", (10 + 0.05 * i) * MIB, 0.1) for i in range(4)]
    marks.append(Mark("c", "far", "far", 20 * MIB, 0.2, "knee"))
    drawn = memory_plot(marks, [], axes=("peak", "step"))
    labels = [(float(x), float(y)) for x, y in re.findall(r'class="label" x="([\d.]+)" y="([\d.]+)"', drawn)]
    circles = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn)]
    width = 7.0 * len("0.1")
    for i, (x, y) in enumerate(labels):
        assert all(abs(x - a) >= width or abs(y - b) >= 13 for a, b in labels[:i])
        assert not any(x < a + 6 and a - 6 < x + width and y - 11 < b + 6 and b - 6 < y + 3 for a, b in circles)
    assert drawn.count("<polyline") == 2  # a series of one mark has no line
    assert 'class="c2 knee"' in drawn and drawn.count("<li>") == 3


def test_without_points_there_is_nothing_to_show():
    assert "nothing to show" in memory_plot([], [(1.0, 1.0)], axes=("peak", "step"))


def test_layers_are_stacked_to_the_axis_and_the_top_is_marked():
    layers = [("a", [2 * MIB] * 4), ("none", [0.0] * 4), ("b", [0.0, MIB, 3 * MIB, MIB])]
    plot = area_plot(layers, {"a": 0, "none": 1, "b": 2}, split=2, top=2, halves=("forward", "backward"))
    polygons = [[tuple(map(float, point.split(","))) for point in found.split()] for found in POLYGON.findall(plot)]
    assert len(polygons) == 2  # an empty layer is not drawn
    assert all(90 <= x <= 990 and 24 <= y <= 280 for polygon in polygons for x, y in polygon)
    lower, upper = polygons
    assert sorted(set(lower)) == sorted(set(lower[:8]) | {(x, 280.0) for x, _ in lower[:8]})
    assert upper[8:] == lower[7::-1]  # the second layer stands on the first
    assert min(y for _, y in upper) == 24.0 and ">5.00 MiB</text>" in plot
    assert "nothing to show" in area_plot([], {}, split=0, top=0, halves=("", ""))
