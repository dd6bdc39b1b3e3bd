"""The picture of memory against time: a mark for each run, with the range of its rounds as a whisker."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from aottrain.ir.units import format_bytes, format_seconds
from aottrain.report.charts import NOTHING, byte_ticks, ticks

Place = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom

BEATEN = "beaten"

_CHARACTER = 7.2  # of the font, on the average
_RADIUS = 6.0
_REACH = 1.5  # of the slowest median: a whisker that is longer would press all marks together
# Beside its colour each series has a shape of its own, for those who do not tell the colours apart.
_OF_LABEL = 30  # what it costs to cover another label, where a mark or a piece of a line costs 1
_SHAPES = (
    "M-6,0a6,6 0 1 0 12,0a6,6 0 1 0 -12,0Z",
    "M-5,-5H5V5H-5Z",
    "M0,-7L7,5H-7Z",
    "M0,-7L7,0L0,7L-7,0Z",
    "M-7,-5H7L0,7Z",
)


@dataclass(frozen=True)
class PlotMark:
    """A point of `memory_plot`."""

    series: str
    """Shares a colour, a shape and a line with others."""
    name: str
    label: str
    num_bytes: float
    seconds: float
    remark: str = ""
    """One of "", "beaten" and "knee"."""
    low: float | None = None
    """Of its seconds, as `high`."""
    high: float | None = None

    @property
    def range(self) -> Place:
        return self.seconds if self.low is None else self.low, self.seconds if self.high is None else self.high


def memory_plot(
    marks: Sequence[PlotMark], line: Sequence[Place], *, axes: tuple[str, str], width: int, from_zero: bool = False
) -> str:
    """Marks with whiskers, those of a series joined in their order, and behind them a line of (bytes, seconds), as SVG
    that is `width` units wide. axes: what goes to the right, and what goes up. They are cut off, or begin at zero.

    A label stands where it covers no mark, whisker, line or other label, as far as there is such a place; rather over
    a line than over another label, and rather there than cut off.
    """
    if not marks:
        return NOTHING
    area = _Area(marks, line, width, from_zero)
    series, labels = _series(marks), list[Box]()
    drawn, occupied = [area.grid()], [box for mark in marks for box in area.boxes(mark)]
    if line:
        drawn.append(f'<polyline class="predicted" points="{area.path(line)}"/>')
        occupied += area.along(line)
    for index, name in enumerate(series):
        places = [(mark.num_bytes, mark.seconds) for mark in marks if mark.series == name]
        drawn.append(f'<polyline class="l{index}" points="{area.path(places)}"/>' if places[1:] else "")
        occupied += area.along(places)
    drawn += [area.mark(mark, series.index(mark.series)) for mark in marks]
    # Those that a reader looks for choose first.
    drawn += [area.label(mark, occupied, labels) for mark in sorted(marks, key=lambda mark: mark.remark == BEATEN)]
    corner = f'x="{area.right}" y="{area.height - 8}" text-anchor="end"'
    drawn.append(f'<text class="axis" {corner}>{escape(axes[0])}</text>')
    drawn.append(f'<text class="axis" x="4" y="14">{escape(axes[1])}</text>')
    name = escape(f"{axes[1]} against {axes[0]}", quote=True)
    box = f'viewBox="0 0 {width} {area.height:.0f}"'
    return f'<svg class="plot" {box} role="img" aria-label="{name}">{"".join(drawn)}</svg>'


def memory_legend(marks: Sequence[PlotMark]) -> str:
    """The series with their shapes and colours."""
    keys = []
    for index, name in enumerate(_series(marks)):
        key = f'<svg class="key-mark" viewBox="-8 -8 16 16" aria-hidden="true">{_shape(index, f"s{index}")}</svg>'
        keys.append(f"<li>{key}{escape(name)}</li>")
    return f'<ul class="legend">{"".join(keys)}</ul>'


def _series(marks: Sequence[PlotMark]) -> list[str]:
    return list(dict.fromkeys(mark.series for mark in marks))


def _shape(index: int, classes: str, rest: str = "/>") -> str:
    return f'<path class="{classes}" d="{_SHAPES[index % len(_SHAPES)]}"{rest}'


class _Area:
    """Where bytes and seconds lie in the drawing."""

    left, top = 70.0, 30.0

    def __init__(self, marks: Sequence[PlotMark], line: Sequence[Place], width: int, from_zero: bool):
        origin = [0.0] if from_zero else []
        sizes = [*origin, *(mark.num_bytes for mark in marks), *(size for size, _ in line)]
        most = _REACH * max([*(mark.seconds for mark in marks), *(time for _, time in line)])
        ends = [min(time, most) for mark in marks for time in mark.range]
        times = [*origin, *ends, *(mark.seconds for mark in marks), *(time for _, time in line)]
        self.right, self.height = width - 36.0, 260.0 + 0.17 * width
        self.bottom = self.height - 50
        texts = byte_ticks(sizes, max(3, width // 100))
        self.sizes = _near(sizes, list(texts), 0.0 if from_zero else 0.06)
        self.size_texts = {tick: text for tick, text in texts.items() if self.sizes[0] <= tick <= self.sizes[1]}
        self.times = ticks(times, 1.0, 7)

    def place(self, size: float, seconds: float) -> Place:
        along = (size - self.sizes[0]) / (self.sizes[1] - self.sizes[0])
        up = (seconds - self.times[0]) / (self.times[-1] - self.times[0])
        return self.left + (self.right - self.left) * along, self.bottom - (self.bottom - self.top) * up

    def path(self, places: Sequence[Place]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*self.place(*at)) for at in places)

    def grid(self) -> str:
        drawn = []
        for tick, text in self.size_texts.items():
            x, _ = self.place(tick, self.times[0])
            drawn.append(f'<line class="grid" x1="{x:.1f}" y1="{self.top}" x2="{x:.1f}" y2="{self.bottom}"/>')
            drawn.append(f'<text x="{x:.1f}" y="{self.bottom + 18}" text-anchor="middle">{text}</text>')
        for tick in self.times:
            _, y = self.place(self.sizes[0], tick)
            drawn.append(f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{self.right}" y2="{y:.1f}"/>')
            text = format_seconds(tick) if tick else "0"
            drawn.append(f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        return "".join(drawn)

    def mark(self, mark: PlotMark, index: int) -> str:
        x, y = self.place(mark.num_bytes, mark.seconds)
        low, high = mark.range
        drawn = []
        if low != high:
            below, above = self.reach(mark)
            end = f"M{x - 4:.1f},{above + 6:.1f}l4,-6l4,6" if high > self.times[-1] else f"M{x - 4:.1f},{above:.1f}h8"
            stem = f"M{x:.1f},{below:.1f}V{above:.1f}M{x - 4:.1f},{below:.1f}h8{end}"
            drawn.append(f'<path class="whisker l{index}" d="{stem}"/>')
        ranged = "" if low == high else f" ({format_seconds(low)} to {format_seconds(high)})"
        caption = f"{mark.name}: {format_bytes(mark.num_bytes)}, {format_seconds(mark.seconds)}{ranged}"
        rest = f' transform="translate({x:.1f},{y:.1f})"><title>{escape(caption)}</title></path>'
        return "".join([*drawn, _shape(index, f"point s{index} {mark.remark}".strip(), rest)])

    def reach(self, mark: PlotMark) -> Place:
        """Of its whisker, lower and upper end; one that goes on beyond the plot ends at its edge."""
        below, above = (self.place(mark.num_bytes, min(time, self.times[-1]))[1] for time in mark.range)
        return below, above

    def boxes(self, mark: PlotMark) -> list[Box]:
        """What a mark covers, and its whisker."""
        x, y = self.place(mark.num_bytes, mark.seconds)
        below, above = self.reach(mark)
        return [(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS), (x - 4, above, x + 4, below)]

    def along(self, places: Sequence[Place]) -> list[Box]:
        """What a line through the places covers: a small box every few units."""
        boxes = []
        for (x, y), (u, v) in itertools.pairwise(self.place(*at) for at in places):
            count = max(1, round(math.hypot(u - x, v - y) / 12))
            steps = ((x + (u - x) * i / count, y + (v - y) * i / count) for i in range(count))
            boxes += [(at - 1, up - 1, at + 1, up + 1) for at, up in steps]
        return boxes

    def label(self, mark: PlotMark, occupied: Sequence[Box], labels: list[Box]) -> str:
        """The text beside the mark; its box is added to those of the labels. Without a label there is none, nor for a
        beaten mark whose text would be far from it or over another one: it has its name where one points at it."""
        if not mark.label:
            return ""
        x, y = self.place(mark.num_bytes, mark.seconds)
        width = _CHARACTER * len(mark.label)
        sides = (10, -10 - width)
        far = 4 if mark.remark == BEATEN else 9
        places = [(x + dx, y + dy) for dy in (-8, 16, 4, -22, 30, -36, 44, -50, 58)[:far] for dx in sides]
        places += [(x - width / 2, y + dy) for dy in (-12, 22, -26, 36, -40, 50, -54, 64)[: far - 1]]
        boxes = [(left, line - 11, left + width, line + 3) for left, line in places]
        best = min(boxes, key=lambda box: self._cost(box, occupied, labels))  # the first of equals
        if mark.remark == BEATEN and self._cost(best, occupied, labels) >= _OF_LABEL:
            return ""
        labels.append(best)
        return f'<text class="label" x="{best[0]:.1f}" y="{best[3] - 3:.1f}">{escape(mark.label)}</text>'

    def _cost(self, box: Box, occupied: Sequence[Box], labels: Sequence[Box]) -> int:
        outside = box[0] < self.left or box[2] > self.right + 36 or box[1] < self.top or box[3] > self.bottom
        return _over(box, occupied) + _OF_LABEL * _over(box, labels) + 1000 * outside


def _near(values: Sequence[float], around: Sequence[float], share: float) -> Place:
    """The ends of an axis: the ticks `around`, or nearer ones where those lie far from all values and two are left."""
    margin = share * (max(values) - min(values))
    low, high = max(around[0], min(values) - margin), min(around[-1], max(values) + margin)
    within = [tick for tick in around if low <= tick <= high]
    return (low, high) if share and len(within) > 1 else (around[0], around[-1])


def _over(box: Box, others: Sequence[Box]) -> int:
    """How many of them it covers a part of."""
    return sum(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in others)
