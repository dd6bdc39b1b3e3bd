"""What loss is a spike: one far above those before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

WINDOW = 50
_LEAST = 20  # losses before anything is called a spike
_NORMAL = 1.4826  # a normal distribution's standard deviation is this many median deviations
_FLOOR = 1e-3  # of the median: where losses hardly differ


class Window:
    """The last losses that were none."""

    def __init__(self, deviations: float | None, losses: Iterable[float] = ()):
        """deviations: how many of them above the median is a spike; None: nothing is."""
        self.deviations = deviations
        self.losses: deque[float] = deque(losses, maxlen=WINDOW)

    def limit(self) -> float | None:
        """The largest loss that is none; None where too little is known."""
        if self.deviations is None or len(self.losses) < _LEAST:
            return None
        middle = median(self.losses)
        deviation = _NORMAL * median(abs(loss - middle) for loss in self.losses)
        return middle + self.deviations * max(deviation, _FLOOR * abs(middle))
