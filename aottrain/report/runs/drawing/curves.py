"""Plots of many curves over steps or seconds: one drawing that stretches to the page, its ticks beside it as text.

A curve is thinned to what a screen shows: of each stretch its lowest and its highest point are kept, so that no spike
is lost. A pointer or the arrow keys read the values (see script.py); without scripts the plots are whole as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from aottrain.ir.units import format_count
from aottrain.report.charts import byte_text, byte_unit, ticks
from aottrain.report.runs.reading import Points
from aottrain.report.style import SERIES

WIDTH, HEIGHT = 2000, 1000  # of the drawing, whatever its size on the page
NUM_DASHES = 3
NUM_LOOKS = len(SERIES) * NUM_DASHES
_NUM_LAYERED = 4
_EDGE = 0.97  # of the width
_SAME_PLACE, _MOST = 0.015, 0.8  # of the height of a plot, and of the points of a curve
_LOG_FROM = 30.0  # largest by smallest value from which an axis is logarithmic
_FARTHEST = 1e300  # the difference of two such values is a finite number yet


@dataclass(frozen=True)
class Key:
    """How a run is told from the others of its page."""

    index: int
    """Its place on the page, by which it is found."""
    name: str
    look: int
    """Its colour and its dashes; runs may share them."""

    @property
    def classes(self) -> str:
        """Of the style."""
        return f"l{self.look % len(SERIES)} d{self.look // len(SERIES) % NUM_DASHES}"


@dataclass(frozen=True)
class Curve:
    """One run's."""

    key: Key
    points: Points
    """(x, y); a y that is not finite, or beyond what an axis can reach, is a gap."""
    style: str = ""
    """A CSS class of its own, beside the run's."""


@dataclass(frozen=True)
class Mark:
    """A place that stands out."""

    x: float
    text: str
    is_fault: bool = False


@dataclass(frozen=True)
class Axes:
    """What a plot shows."""

    title: str
    x_name: str
    x_unit: str = "count"
    """One of count, seconds, bytes and plain, as `y_unit`."""
    y_unit: str = "plain"
    from_zero: bool = False
    is_layered: bool = False
    """Whether few curves that cover each other are drawn each thinner than the one below, so that all are seen."""
    note: str = ""


def thinned(points: Points, most: int) -> Points:
    """At most about `most` of the points: first, last, and the lowest and highest of each stretch, in their order; and
    of a stretch with gaps the first of these."""
    if len(points) <= most:
        return points
    stretches, inner = max(1, (most - 2) // 2), len(points) - 2
    edges = [1 + inner * i // stretches for i in range(stretches + 1)]
    chosen = [index for start, end in itertools.pairwise(edges) for index in _ends(points, start, end)]
    return [points[i] for i in [0, *chosen, len(points) - 1]]


def _ends(points: Points, start: int, end: int) -> list[int]:
    finite = [i for i in range(start, end) if math.isfinite(points[i][1])]
    kept = {function(finite, key=lambda i: points[i][1]) for function in (min, max)} if finite else set()
    gap = next((i for i in range(start, end) if not math.isfinite(points[i][1])), None)
    return sorted(kept if gap is None else {*kept, gap})


def line_plot(curves: Sequence[Curve], axes: Axes, *, marks: Sequence[Mark] = (), budget: int = 200_000) -> str:
    """A figure. budget: about how many characters all its curves may take."""
    curves = [replace(curve, points=_within_reach(curve.points)) for curve in curves]
    finite = [(x, y) for curve in curves for x, y in curve.points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return ""
    steps = [x for curve in curves for x, _ in curve.points if math.isfinite(x)]  # a loss that is not a number has one
    scale = _Scale([*steps, *(mark.x for mark in marks)], [y for _, y in finite], axes)
    most = max(40, min(900, budget // (7 * len(curves))))
    drawn = [scale.grid()]
    for curve in curves:
        classes = f"curve {curve.key.classes} {curve.style}".strip()
        path = scale.path(thinned(curve.points, most))
        named = f'data-run="{curve.key.index}" data-name="{escape(curve.key.name, quote=True)}"'
        drawn.append(f'<path class="{classes}" {named} d="{path}"/>' if path else "")
    flags = "".join(scale.flag(mark) for mark in marks)
    is_layered = axes.is_layered and 1 < len(curves) <= _NUM_LAYERED and _cover_each_other(curves, scale)
    many = " many" if len(curves) > NUM_LOOKS else " layered" if is_layered else ""
    small = f"<small>{escape(axes.note)}</small>" if axes.note else ""
    label = escape(f"{axes.title}, {len(curves)} curve{'s' if len(curves) > 1 else ''}", quote=True)
    return (
        f'<figure class="lines{many}" {scale.data()}><figcaption>{escape(axes.title)}{small}</figcaption>'
        f'<div class="frame"><div class="ys" aria-hidden="true">{scale.y_labels()}</div>'
        f'<div class="area" role="img" tabindex="0" aria-label="{label}"><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'preserveAspectRatio="none" aria-hidden="true">{"".join(drawn)}</svg>{flags}</div>'
        f'<div class="xs" aria-hidden="true">{scale.x_labels()}</div></div>'
        f'<div class="foot"><p class="readout dim"></p><span>{escape(axes.x_name)}</span></div></figure>'
    )


def _within_reach(points: Points) -> Points:
    return [(x, y if abs(y) <= _FARTHEST else math.nan) for x, y in points]


def _cover_each_other(curves: Sequence[Curve], scale: _Scale) -> bool:
    """Whether most of each curve lies where the first one does, as far as one can see."""
    first = dict(curves[0].points)
    for curve in curves[1:]:
        pairs = [(first[x], y) for x, y in curve.points if x in first and math.isfinite(y) and math.isfinite(first[x])]
        close = sum(abs(scale.up(a) - scale.up(b)) < _SAME_PLACE for a, b in pairs)
        if not pairs or close < _MOST * len(pairs):
            return False
    return True


def written(unit: str, value: float) -> str:
    """A value of an axis of seconds, counts or plain numbers."""
    if unit == "seconds":  # ticks are round numbers, which need no third digit
        scale, name = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")
        return f"{value * scale:,.4g} {name}" if value else "0"
    if unit == "count":
        return format_count(value)
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e") if abs(value) >= 1e-12 else "0"


class _Scale:
    """Where values lie in the drawing."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], axes: Axes):
        self.axes = axes
        self.x0, self.x1 = min(xs), max(xs)
        if self.x0 == self.x1:
            self.x0, self.x1 = self.x0 - 0.5, self.x1 + 0.5
        low, high = min(ys), max(ys)
        self.high = high
        self.is_log = low > 0 and high / low > _LOG_FROM and not axes.from_zero
        if self.is_log:
            self.y_ticks = _log_ticks(low, high)
            self.y0, self.y1 = low, high
        else:
            self.y_ticks = _even_ticks(0.0 if axes.from_zero else low, high, axes.y_unit, 5)
            self.y0, self.y1 = min(self.y_ticks[0], low), max(self.y_ticks[-1], high)
        inside = _even_ticks(self.x0, self.x1, axes.x_unit, 8)
        self.x_ticks = [tick for tick in inside if self.x0 <= tick <= self.x1]

    def along(self, x: float) -> float:
        return (x - self.x0) / (self.x1 - self.x0)

    def up(self, y: float) -> float:
        if self.is_log:
            return math.log(y / self.y0) / math.log(self.y1 / self.y0)
        return (y - self.y0) / (self.y1 - self.y0)

    def path(self, points: Points) -> str:
        """Whole numbers, each relative to the one before; a new beginning after what is not finite."""
        parts: list[str] = []
        last: tuple[int, int] | None = None
        for x, y in points:
            if not (math.isfinite(x) and math.isfinite(y)):
                last = None
                continue
            at = round(WIDTH * self.along(x)), round(HEIGHT * (1 - self.up(y)))
            if last is None:
                parts.append(f"M{at[0]} {at[1]}l0 0")  # so that a single point is seen, too
            elif at != last:
                right, down = at[0] - last[0], at[1] - last[1]
                parts.append(f" {right}{down}" if down < 0 else f" {right} {down}")
            last = at
        return "".join(parts)

    def grid(self) -> str:
        lines = [f"M0 {HEIGHT * (1 - self.up(tick)):.0f}H{WIDTH}" for tick in self.y_ticks]
        lines += [f"M{WIDTH * self.along(tick):.0f} 0V{HEIGHT}" for tick in self.x_ticks]
        return f'<path class="grid" d="{"".join(lines)}"/>'

    def y_labels(self) -> str:
        unit, bytes_in = self.axes.y_unit, byte_unit([self.high])
        texts = [byte_text(t, bytes_in) if unit == "bytes" else written(unit, t) for t in self.y_ticks]
        return "".join(
            f'<span style="bottom:{100 * self.up(tick):.1f}%">{escape(text)}</span>'
            for tick, text in zip(self.y_ticks, texts, strict=True)
        )

    def x_labels(self) -> str:
        unit = self.axes.x_unit
        shown = []
        for tick in self.x_ticks:
            along = self.along(tick)
            edge = ' class="edge"' if along > _EDGE else ""  # else its text ends beyond the panel
            shown.append(f'<span{edge} style="left:{100 * along:.1f}%">{written(unit, tick)}</span>')
        return "".join(shown)

    def flag(self, mark: Mark) -> str:
        kind = "flag fault" if mark.is_fault else "flag"
        text = escape(mark.text, quote=True)
        return f'<i class="{kind}" style="left:{100 * self.along(mark.x):.2f}%" title="{text}"></i>'

    def data(self) -> str:
        """What the script turns places into values by."""
        parts = {"x0": self.x0, "x1": self.x1, "y0": self.y0, "y1": self.y1}
        texts = [f'data-{name}="{value!r}"' for name, value in parts.items()]
        texts += [f'data-x="{self.axes.x_unit}"', f'data-y="{self.axes.y_unit}"']
        texts += [f'data-xname="{escape(self.axes.x_name, quote=True)}"']
        return " ".join([*texts, *(['data-log="1"'] if self.is_log else [])])


def _even_ticks(low: float, high: float, unit: str, most: int) -> list[float]:
    """Round numbers around both."""
    if low == high:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 10, high + abs(high) / 10)
    if unit == "bytes":
        return ticks([low, high], byte_unit([high]), most)
    step = _step(high - low, most)
    step = max(step, 1.0) if unit == "count" else step
    return [step * i for i in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _step(width: float, most: int) -> float:
    power = 10.0 ** math.floor(math.log10(width))
    return next(power * part for part in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if width / (power * part) <= most)


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between, with 2 and 5 of each where these are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    parts = (1, 2, 5) if len(powers) <= 3 else (1,)
    stride = max(1, len(powers) // 6)
    values = [part * 10.0**power for power in list(powers)[::stride] for part in parts]
    return [value for value in values if low <= value <= high] or [low, high]
