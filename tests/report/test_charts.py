"""The plots: every point lies within the axes, whose ticks are round, at each width that a page may have."""

import re

import pytest

from aottrain.report.charts import WIDTHS, at_each_width, bars, size, stacked_bar
from aottrain.report.layers import Layers, area_plot
from aottrain.report.scatter import PlotMark, memory_legend, memory_plot

LAYER = re.compile(r'<path class="layer (\w+)" d="M([^"]+)Z"')
POINT = re.compile(r'<path class="(point [^"]*)" d="[^"]*" transform="translate\(([\d.]+),([\d.]+)\)"')
MIB, GIB = 1024.0**2, 1024.0**3
POINTS = {
    "far apart": [(22 * MIB, 0.05), (900 * MIB, 3.0)],
    "close": [(1.50 * GIB, 0.1), (1.51 * GIB, 0.101)],
    "one": [(80 * GIB, 12.0)],
    "little": [(1024.0, 0.0)],
    "beyond every unit": [(2.0**60, 1.0), (2.0**61, 2.0)],
}
AXES = ("peak", "step")
widths = pytest.mark.parametrize("width", WIDTHS.values())


@widths
@pytest.mark.parametrize("name", POINTS)
def test_points_and_ticks_lie_within_the_drawing(name, width):
    places = POINTS[name]
    marks = [PlotMark("<ours>", "<a>", "<b>", *place) for place in places]
    drawn = memory_plot(marks, places, axes=AXES, width=width)
    x_grid = [float(x) for x in re.findall(r'<line class="grid" x1="([\d.]+)" y1="30.0"', drawn)]
    assert 2 <= len(x_grid) <= 13
    points = [(float(x), float(y)) for _, x, y in POINT.findall(drawn)]
    assert len(points) == len(places)
    assert all(70 <= x <= width - 36 and y >= 30 for x, y in points)
    ticks = re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="middle">([^<]*)<', drawn)
    assert len({text for _, text in ticks}) == len(ticks)
    # No tick is cut off at the edge, nor runs into the next.
    halves = [(float(x), 7.2 * len(text) / 2) for x, text in ticks]
    assert all(x - half > 0 and x + half <= width for x, half in halves)
    assert all(a + half < b - other for (a, half), (b, other) in zip(halves, halves[1:], strict=False))
    assert all(f"&lt;{text}&gt;" in drawn + memory_legend(marks) for text in ("ours", "a", "b"))
    assert all(f"<{text}>" not in drawn + memory_legend(marks) for text in ("ours", "a", "b"))


@widths
def test_long_labels_are_not_cut_and_do_not_cover_each_other(width):
    """Two series side by side, with a line through them, and a run at the right edge: as seen at 400."""
    places = {"a-long-name-0.0": (95, 0.48), "a-long-name-0.2": (100, 0.44), "a-long-name-1.0": (190, 0.36)}
    places |= {"another-name-0.0": (98, 0.57), "another-name-1.0": (200, 0.46), "eager": (212, 0.43)}
    marks = [
        PlotMark(name.rpartition("-")[0] or name, name, name, at * MIB, time, low=time - 0.02, high=time + 0.04)
        for name, (at, time) in places.items()
    ]
    drawn = memory_plot(marks, [(63 * MIB, 0.38), (119 * MIB, 0.3)], axes=AXES, width=width)
    found = re.findall(r'class="label" x="([\d.-]+)" y="([\d.]+)">([^<]*)<', drawn)
    boxes = [(float(x), float(y), float(x) + 7.2 * len(text)) for x, y, text in found]
    assert len(boxes) == 6 and all(left > 60 and right <= width + 0.1 for left, _, right in boxes)
    for i, (left, y, right) in enumerate(boxes):
        assert all(right <= a + 0.1 or b <= left + 0.1 or abs(y - at) >= 13 for a, at, b in boxes[:i])


@widths
def test_labels_cover_neither_marks_nor_each_other(width):
    marks = [PlotMark("a" if i % 2 else "b", f"run {i}", f"0.{i}", (10 + 0.05 * i) * MIB, 0.1) for i in range(4)]
    marks.append(PlotMark("c", "far", "far", 20 * MIB, 0.2, "knee"))
    drawn = memory_plot(marks, [], axes=AXES, width=width)
    labels = [(float(x), float(y)) for x, y in re.findall(r'class="label" x="([\d.]+)" y="([\d.]+)"', drawn)]
    points = [(float(x), float(y)) for _, x, y in POINT.findall(drawn)]
    text = 7.2 * len("0.1")
    for i, (x, y) in enumerate(labels):
        assert all(abs(x - a) >= text - 0.1 or abs(y - b) >= 13 for a, b in labels[:i])
        assert not any(x < a + 6 and a - 6 < x + text and y - 11 < b + 6 and b - 6 < y + 3 for a, b in points)
    assert drawn.count("<polyline") == 2  # a series of one mark has no line
    assert "point s2 knee" in [classes for classes, _, _ in POINT.findall(drawn)]
    assert memory_legend(marks).count("<li>") == 3


def test_the_range_of_a_mark_is_a_whisker_within_the_axes():
    marks = [
        PlotMark("a", "run", "run", 10 * MIB, 0.2, low=0.1, high=0.9),
        PlotMark("b", "other", "other", 20 * MIB, 0.2),
    ]
    drawn = memory_plot(marks, [], axes=AXES, width=640)
    (found,) = re.findall(r'class="whisker l0" d="M([\d.]+),([\d.]+)V([\d.]+)', drawn)
    _, below, above = map(float, found)
    grid = [float(y) for y in re.findall(r'<line class="grid" x1="70.0" y1="([\d.]+)"', drawn)]
    assert min(grid) <= above < below <= max(grid)
    assert "run: 10.0 MiB, 200 ms (100 ms to 900 ms)" in drawn


def test_a_round_that_something_disturbed_does_not_press_all_marks_together():
    quiet = [PlotMark("a", f"r{i}", "", (10 + i) * MIB, 0.02 + 0.01 * i, low=0.01, high=0.06) for i in range(4)]
    shaken = [*quiet, PlotMark("b", "shaken", "", 9 * MIB, 0.03, low=0.02, high=1.4)]
    drawn = memory_plot(shaken, [], axes=AXES, width=640)
    grid = [float(y) for y in re.findall(r'<line class="grid" x1="70.0" y1="([\d.]+)"', drawn)]
    heights = [float(y) for _, _, y in POINT.findall(drawn)]
    assert max(heights) - min(heights) > 0.3 * (max(grid) - min(grid))
    (stem,) = re.findall(r'class="whisker l1" d="([^"]*)"', drawn)
    assert stem.endswith("l4,-6l4,6") and f"V{min(grid):.1f}" in stem  # an arrow at the edge
    assert "l4,-6" not in memory_plot(quiet, [], axes=AXES, width=640)
    assert "(20.0 ms to 1.40 s)" in drawn


def test_on_a_phone_the_marks_fill_the_plot_and_each_label_is_beside_its_mark():
    """Fourteen runs between 3.8 and 10.9 MiB stood on an axis from 0 to 15, some labels far from their marks."""
    places = [(3.78, 0.16), (4.72, 0.04), (6.23, 0.06), (6.23, 0.1), (6.29, 0.16), (6.27, 0.11), (6.74, 0.03)]
    places += [(7.13, 0.1), (8.74, 0.044), (8.95, 0.11), (9.36, 0.064), (9.64, 0.18), (10.4, 0.053), (10.9, 0.08)]
    marks = [
        PlotMark("s", f"run-{i}", f"run-{i}", x * MIB, y, "" if i < 2 else "beaten") for i, (x, y) in enumerate(places)
    ]
    drawn = memory_plot(marks, [], axes=AXES, width=min(WIDTHS.values()))
    points = [(float(x), float(y)) for _, x, y in POINT.findall(drawn)]
    assert max(x for x, _ in points) - min(x for x, _ in points) > 0.8 * (min(WIDTHS.values()) - 106)
    labels = {
        text: (float(x), float(y))
        for x, y, text in re.findall(r'class="label" x="([\d.-]+)" y="([\d.]+)">([^<]*)<', drawn)
    }
    assert {"run-0", "run-1"} <= labels.keys()
    for name, (x, y) in labels.items():
        at, up = points[int(name[4:])]
        assert abs(y - up) <= 45 and abs(x - at) <= 60
    assert all(f"<title>run-{i}: " in drawn for i in range(len(marks)))


def test_without_points_there_is_nothing_to_show():
    assert "nothing to show" in memory_plot([], [(1.0, 1.0)], axes=AXES, width=640)
    assert "nothing to show" in area_plot(Layers([], 0, 0), {}, width=640)
    assert "nothing to show" in stacked_bar([("a", 0)], title="", colours={"a": "m-batch"})


def corners(path: str) -> list[tuple[float, float]]:
    """Of an outline: where each of its straight lines ends."""
    (x, y), found = map(float, path.split("H")[0].split("V")[0].split(",")), []
    for letter, number in re.findall(r"([HV])([\d.]+)", path):
        x, y = (float(number), y) if letter == "H" else (x, float(number))
        found.append((x, y))
    return found


@widths
def test_layers_are_stacked_to_the_axis_and_the_top_is_marked(width):
    layers = [("a", [2 * MIB] * 4), ("none", [0.0] * 4), ("b", [0.0, MIB, 3 * MIB, MIB])]
    colours = {"a": "one", "none": "two", "b": "three"}
    plot = area_plot(Layers(layers, split=2, top=2), colours, width=width)
    found = {name: corners(path) for name, path in LAYER.findall(plot)}
    assert list(found) == ["one", "three"]  # an empty layer is not drawn
    lower, upper = found.values()
    bottom, floor = max(y for _, y in lower), min(y for _, y in lower)
    assert {y for _, y in lower} == {bottom, floor}  # from the axis to two MiB
    assert all(70 <= x <= width - 6 and 24 <= y <= bottom for x, y in [*lower, *upper])
    assert max(y for _, y in upper) == floor  # the second layer stands on the first
    assert min(y for _, y in upper) == 24.0 and ">5.00 MiB</text>" in plot
    assert upper[-1] == (70.0, floor)  # and comes back to where it began
    assert "forward" in plot and "backward" in plot
    (mark,) = re.findall(r'<circle class="top" cx="([\d.]+)" cy="([\d.]+)"', plot)
    edges = [x for x, y in upper if y == 24.0]  # of the column that is the top
    assert float(mark[0]) == pytest.approx((min(edges) + max(edges)) / 2, abs=0.11) and float(mark[1]) == 24.0


def test_a_plot_is_drawn_for_each_width_and_sizes_keep_their_bytes():
    asked = []
    drawn = at_each_width(lambda width: asked.append(width) or f"<p>{width}</p>")
    assert asked == list(WIDTHS.values()) and all(f'<div class="{name}"><p>' in drawn for name in WIDTHS)
    assert size(1_572_864) == '<span title="1,572,864 bytes">1.50 MiB</span>'
    for picture in (bars([("x.y", 1024)]), stacked_bar([("x", 1024)], title="", colours={"x": "m-batch"})):
        assert "1.00 KiB" in picture and "1,024 bytes" in picture
