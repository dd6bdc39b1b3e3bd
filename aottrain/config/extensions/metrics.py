"""Metrics of a recipe's own, by which settings judge: `accuracy:max`, with what is better of two values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aottrain.config.schema import suggest

LOSS = "loss"
FORM = "loss, or a metric of the recipe's own with its better end, as accuracy:max or error:min"


@dataclass(frozen=True)
class Judge:
    """Which of two evaluations is the better one."""

    name: str = LOSS
    """The held-out loss, of which the lower one is better, or a metric."""
    is_highest: bool = False

    @classmethod
    def of(cls, text: str) -> Judge:
        """ValueError: it is not of the form that FORM says."""
        if text == LOSS:
            return cls()
        name, _, end = text.rpartition(":")
        if not name or end not in ("max", "min"):
            raise ValueError(text)
        return cls(name, end == "max")

    def __str__(self) -> str:
        return LOSS if self.is_loss else f"{self.name}:{'max' if self.is_highest else 'min'}"

    @property
    def is_loss(self) -> bool:
        return self.name == LOSS

    @property
    def end(self) -> str:
        """Of a row of values, where the best one is."""
        return "highest" if self.is_highest else "lowest"

    @property
    def reversed(self) -> Judge:
        """Of the same figure the one for which its other end is the better one."""
        return Judge(self.name, not self.is_highest)

    @property
    def worst(self) -> float:
        """What each value is better than."""
        return -math.inf if self.is_highest else math.inf

    @property
    def title(self) -> str:
        return f"held-out {self.name}"

    def figure(self, loss: float | None, metrics: Mapping[str, float] | None) -> float | None:
        """The one that counts, of an evaluation; None where it has none."""
        return loss if self.is_loss else (metrics or {}).get(self.name)

    def is_better(self, value: float, other: float) -> bool:
        return value > other if self.is_highest else value < other

    def lacks(self, names: Iterable[str]) -> str:
        """ "" where this is among the recipe's metrics, else what is wrong."""
        known = list(names)
        if self.is_loss or self.name in known:
            return ""
        there = f"its metrics: {', '.join(known)}" if known else "it has no metrics(model, batch)"
        return f"the recipe has no metric {self.name}{suggest(self.name, known)} ({there})"


def own_objectives(objectives: Iterable[str]) -> dict[str, Judge]:
    """Those of sweep.objectives that are a recipe's own metrics."""
    return {text: Judge.of(text) for text in objectives if text.endswith((":max", ":min"))}
