"""Ratios of times that were measured more than once, and how they spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from aottrain.config.choices import HIGHEST_IS_BEST

# Peaks that differ by less count as equal: a predicted peak is that close to the measured one.
EQUAL_PEAK = 0.01


def median_figure(name: str, values: Sequence[float]) -> float | None:
    """A figure of several rounds; None of none. A rate is that at the median time: the mean of two rounds' times does
    not go with the mean of their rates, and a row would contradict itself."""
    if not values:
        return None
    if name in HIGHEST_IS_BEST and all(value > 0 for value in values):
        return 1 / statistics.median(1 / value for value in values)
    return statistics.median(values)


@dataclass(frozen=True)
class Ratio:
    """Of two runs' step times."""

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """A difference that lies within the spread is none."""
        return "faster" if self.high < 1 else "slower" if self.low > 1 else "level"

    def __str__(self) -> str:
        return f"{self.median:.2f}x" + (f" [{self.low:.2f}, {self.high:.2f}]" if self.low != self.high else "")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Between which the middle half lies, and the median: (low, median, high), each one of the values, chosen as the
    median in summary.json is (see percentile in metrics/throughput.py)."""
    ordered = sorted(values)
    low, median, high = (ordered[max(0, math.ceil(part * len(ordered)) - 1)] for part in (0.25, 0.5, 0.75))
    return low, median, high


def time_ratio(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Ratio | None:
    """The times of `one` in units of those of `other`. None where one of them has none.

    Where both were measured in the same rounds, more than one, it is taken within each: lowest and highest round are
    its ends. Else the ends are those of the middle halves of all times: where these overlap, 1 lies between.
    """
    ones, others = ([times for times in rounds if times] for rounds in (one, other))
    if not ones or not others:
        return None
    if len(ones) == len(others) > 1:
        ratios = [quartiles(a)[1] / quartiles(b)[1] for a, b in zip(ones, others, strict=True) if quartiles(b)[1] > 0]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None
    (a, b, c), (x, y, z) = (quartiles([time for times in rounds for time in times]) for rounds in (ones, others))
    return Ratio(b / y, a / z, c / x) if x > 0 else None
