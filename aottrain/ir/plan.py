"""Decisions as values: they can be printed, tested, and written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aottrain.ir.settings.budget import Budget
from aottrain.ir.units import format_bytes


@dataclass(frozen=True)
class ForwardValue:
    """A value that the forward computes, as a partition policy sees it.

    name: in the joint graph; op: ATen overload that computes it; module: path of the module it was written in ("" if
    none); source: "file.py:line"; num_bytes: of its storage; flops: of computing it once from what the op reads.
    """

    name: str
    op: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    flops: int


@dataclass(frozen=True)
class PartitionPlan:
    """Which forward values cross to the backward, and why. Nodes are named as in the joint graph.

    saved: values that the forward hands over, in program order; unmutated primals need no entry.
    recomputed: forward values that the backward computes again, in program order.
    reasons: for each saved and each recomputed value, why.
    saved_bytes: distinct storages of `saved`; parameters, buffers and batch are never part of it.
    schedule: the backward's calls in order, repeats allowed: a value that is named again is computed again. None: the
    joint graph's order, with each recomputed value just before its first use.
    budget: what was asked for (None where the strategy takes none).
    curve: of the family that a budget chooses from: (peak in bytes, seconds of recompute) of each plan.
    limit: the peak in bytes that the budget allows.
    """

    strategy: str
    saved: tuple[str, ...]
    recomputed: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    saved_bytes: int = 0
    budget: Budget | None = None
    schedule: tuple[str, ...] | None = None
    curve: tuple[tuple[int, float], ...] = ()
    limit: int | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.strategy}: {len(self.saved)} saved ({format_bytes(self.saved_bytes)}), "
            f"{len(self.recomputed)} recomputed"
        ]
        lines += [f"  save {name}: {self.reasons.get(name, '')}" for name in self.saved]
        lines += [f"  recompute {name}: {self.reasons.get(name, '')}" for name in self.recomputed]
        return "\n".join(lines)
