"""The picture of memory over a step: bytes stacked by category, op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from aottrain.ir.units import format_bytes
from aottrain.report.charts import NOTHING, byte_ticks

_CHARACTER = 7.2  # of the font, on the average


@dataclass(frozen=True)
class Layers:
    """A stacked area plot."""

    layers: Sequence[tuple[str, Sequence[float]]]
    """(label, bytes of each column), the first layer at the bottom."""
    split: int
    """The column at which the second of the two `halves` begins."""
    top: int
    """The column that is marked."""
    halves: tuple[str, str] = ("forward", "backward")


def area_plot(shown: Layers, colours: Mapping[str, str], *, width: int) -> str:
    """As SVG, `width` units wide. colours: the CSS class of each label."""
    sums = [sum(column) for column in zip(*(values for _, values in shown.layers), strict=True)]
    if not sums:
        return NOTHING
    area = _Area(sums, width)
    drawn, below = [area.grid()], [0.0] * len(sums)
    for label, values in shown.layers:
        above = [a + b for a, b in zip(below, values, strict=True)]
        if any(values):
            shape = f'<path class="layer {colours[label]}" d="{area.outline(above, below)}">'
            drawn.append(f"{shape}<title>{escape(label)}</title></path>")
        below = above
    drawn.append(area.halves(shown))
    drawn.append(area.top(shown.top))
    name = f"Bytes alive over the step, {format_bytes(sums[shown.top])} at the top"
    box = f'viewBox="0 0 {width} {area.height:.0f}"'
    return f'<svg class="plot" {box} role="img" aria-label="{name}">{"".join(drawn)}</svg>'


class _Area:
    """Where columns and bytes lie in the drawing."""

    left, high = 70.0, 24.0

    def __init__(self, sums: Sequence[float], width: int):
        self.sums = sums
        self.right = width - 6.0
        self.height = 200.0 + 0.11 * width
        self.bottom = self.height - 28
        self.step = (self.right - self.left) / len(sums)
        self.texts = byte_ticks([0, max(*sums, 1)], 5)
        self.ticks = list(self.texts)

    def up(self, size: float) -> float:
        return self.bottom - (self.bottom - self.high) * size / self.ticks[-1]

    def grid(self) -> str:
        drawn = []
        for tick, text in self.texts.items():
            y = self.up(tick)
            drawn.append(f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{self.right}" y2="{y:.1f}"/>')
            drawn.append(f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        return "".join(drawn)

    def outline(self, above: Sequence[float], below: Sequence[float]) -> str:
        """Along the upper edge to the right, and back along the lower one."""
        forth = self._edge(above, range(len(above)), lambda i: i + 1)
        back = self._edge(below, range(len(below) - 1, -1, -1), lambda i: i)
        return f"M{self.left:.1f},{self.up(above[0]):.1f}{forth}V{self.up(below[-1]):.1f}{back}Z"

    def _edge(self, values: Sequence[float], order: range, end: Callable[[int], int]) -> str:
        drawn = []
        for i, following in zip(order, [*order[1:], None], strict=True):
            if following is None or values[following] != values[i]:
                drawn.append(f"H{self.left + self.step * end(i):.1f}")
                drawn.append("" if following is None else f"V{self.up(values[following]):.1f}")
        return "".join(drawn)

    def halves(self, shown: Layers) -> str:
        """A line where each half begins, and its name where there is room for it."""
        drawn, begins = [], (0, shown.split)
        for column, end, label in zip(begins, (shown.split, len(self.sums)), shown.halves, strict=True):
            x, room = self.left + self.step * column, self.step * (end - column)
            drawn.append(f'<line class="mark" x1="{x:.1f}" y1="{self.high}" x2="{x:.1f}" y2="{self.bottom}"/>')
            if room > _CHARACTER * len(label):
                drawn.append(f'<text x="{x + 4:.1f}" y="{self.bottom + 18}">{escape(label)}</text>')
        return "".join(drawn)

    def top(self, column: int) -> str:
        x, y = self.left + self.step * (column + 0.5), self.up(self.sums[column])
        anchor = "end" if column > len(self.sums) / 2 else "start"
        text = f'<text class="label" x="{x:.1f}" y="{y - 9:.1f}" text-anchor="{anchor}">'
        circle = f'<circle class="top" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        return f"{circle}{text}{format_bytes(self.sums[column])}</text>"
