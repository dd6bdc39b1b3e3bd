"""Points of memory and time: which are beaten, where the knee is, and who is faster at an equal peak.

A point's times are medians of rounds in which all points took their turns, so ratios are taken within a round.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from aottrain.ir.units import format_bytes
from aottrain.report.runs.spread import EQUAL_PEAK, Ratio

Place = tuple[float, float]
Curve = Sequence[Place]


@dataclasses.dataclass(frozen=True)
class Point:
    """One run's figures; None where there is none."""

    name: str
    engine: str
    budget: float | str | None = None
    """Partition.budget; for torch_compile torch's activation_memory_budget."""
    error: str = ""
    backend: str = ""
    """Of torch_compile."""
    compile_s: float | None = None
    predicted_peak_bytes: int | None = None
    peak_bytes: int | None = None
    prediction_error: float | None = None
    round_ms: tuple[float, ...] = ()
    """The median step of each round."""
    step_ms_median: float | None = None
    speedup: float | None = None
    """Eager's step time in units of this one's."""
    speedup_min: float | None = None
    speedup_max: float | None = None
    saved_bytes: int | None = None
    fallbacks: int | None = None
    machine: str = ""
    dominated: bool = False
    knee: bool = False

    @property
    def place(self) -> Place | None:
        """(peak, step time), or None where one of them was not measured."""
        if self.peak_bytes is None or self.step_ms_median is None:
            return None
        return self.peak_bytes, self.step_ms_median

    @property
    def series(self) -> str:
        """Whose sweep it belongs to."""
        return self.backend or self.engine

    def timed(self, round_ms: Sequence[float]) -> Point:
        """With these medians of rounds."""
        median = statistics.median(round_ms) if round_ms else None
        return dataclasses.replace(self, round_ms=tuple(round_ms), step_ms_median=median)


def ratio(point: Point, other: Point) -> Ratio | None:
    """The step time of `point` in units of that of `other`; None where they share no round."""
    ratios = [a / b for a, b in zip(point.round_ms, other.round_ms, strict=False) if b]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def dominated(places: Sequence[Place | None]) -> list[bool]:
    """For each place, whether another one is nowhere worse and somewhere better. None neither beats nor is beaten."""

    def beats(other: Place | None, place: Place) -> bool:
        return other is not None and other != place and other[0] <= place[0] and other[1] <= place[1]

    return [place is not None and any(beats(other, place) for other in places) for place in places]


def beaten(points: Sequence[Point]) -> list[bool]:
    """For each point, whether another one beats it: in no more memory, faster in every round that they share; or in
    less memory, by more than EQUAL_PEAK, and not slower by the median. A difference within the spread beats nothing."""

    def beats(other: Point, point: Point) -> bool:
        compared = ratio(other, point)
        if compared is None or other.peak_bytes is None or point.peak_bytes is None:
            return False
        faster = other.peak_bytes <= point.peak_bytes and compared.verdict == "faster"
        return faster or (other.peak_bytes < point.peak_bytes * (1 - EQUAL_PEAK) and compared.median <= 1)

    return [any(beats(other, point) for other in points if other is not point) for point in points]


def knee(places: Sequence[Place | None]) -> int | None:
    """The index of the undominated place farthest below the straight line between the ends of all undominated ones.

    Both coordinates run from 0 to 1 between the ends. None where no place is below the line.
    """
    worse = dominated(places)
    kept = sorted((place, i) for i, place in enumerate(places) if place is not None and not worse[i])
    if len(kept) < 3:
        return None
    (low, slow), (high, fast) = kept[0][0], kept[-1][0]
    if low == high or slow == fast:  # equal places only
        return None
    depths = [(1 - (x - low) / (high - low) - (y - fast) / (slow - fast), i) for (x, y), i in kept[1:-1]]
    depth, index = max(depths)
    return index if depth > 0 else None


def judged(points: Sequence[Point]) -> list[Point]:
    """The points with speed-ups, dominated ones and the knee marked; the knee is that of our budgets alone."""
    eager = next((point for point in points if point.engine == "eager"), None)
    worse = beaten(points)
    chosen = knee([point.place if point.engine == "aot" else None for point in points])
    marked = []
    for i, point in enumerate(points):
        speed = ratio(eager, point) if eager else None
        marked.append(
            dataclasses.replace(
                point,
                speedup=speed.median if speed else None,
                speedup_min=speed.low if speed else None,
                speedup_max=speed.high if speed else None,
                dominated=worse[i],
                knee=i == chosen,
            )
        )
    return marked


def equal_peak_verdicts(points: Sequence[Point]) -> list[str]:
    """A line for each peer's point that no other of its own sweep beats: our fastest run at its peak against it."""
    peers = [point for point in points if point.engine != "aot" and point.place is not None]
    ours = [point for point in points if point.engine == "aot" and point.place is not None]
    lines = []
    for peer in peers:
        sweep = [other for other in peers if other.series == peer.series and other is not peer]
        if not beaten([peer, *sweep])[0]:
            lines.append(_verdict(peer, ours))
    return lines


def _verdict(peer: Point, ours: Sequence[Point]) -> str:
    at = f"at the peak of {peer.name} ({format_bytes(peer.peak_bytes or 0)})"
    limit = (peer.peak_bytes or 0) * (1 + EQUAL_PEAK)
    fitting = [point for point in ours if (point.peak_bytes or 0) <= limit]
    best = min(fitting, key=lambda point: point.step_ms_median or 0, default=None)
    compared = ratio(best, peer) if best else None
    if best is None or compared is None:
        return f"{at}: no run of ours is as low"
    alone = ", in one round" if len(peer.round_ms) == 1 else ""
    size = format_bytes(best.peak_bytes or 0)
    return f"{at}: {best.name} ({size}) takes {compared} of its time: {compared.verdict}{alone}"


def predicted_line(points: Sequence[Point], curve: Curve) -> list[Place]:
    """The curve as (peak, step in s): the measured step of the roomiest budget, and the recompute that others add."""
    measured = [
        point for point in points if point.predicted_peak_bytes is not None and point.step_ms_median is not None
    ]
    start = max(measured, key=lambda point: point.predicted_peak_bytes or 0, default=None)
    if start is None or start.predicted_peak_bytes is None or start.step_ms_median is None:
        return []
    base = min((seconds for peak, seconds in curve if peak <= start.predicted_peak_bytes), default=None)
    if base is None:
        return []
    return [(peak, start.step_ms_median / 1e3 + seconds - base) for peak, seconds in curve]


def planned_peak(curve: Curve, num_bytes: int) -> int | None:
    """The predicted peak of the plan that a budget of so many bytes chooses; None where no plan is as low."""
    fitting = [(seconds, peak) for peak, seconds in curve if peak <= num_bytes]
    return int(min(fitting)[1]) if fitting else None
