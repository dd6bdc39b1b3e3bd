"""Decisions as values: they can be printed, tested, and written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aottrain.ir.settings.budget import Budget
from aottrain.ir.shown import Shown
from aottrain.ir.units import format_bytes


@dataclass(frozen=True)
class ForwardValue:
    """A value that the forward computes, as a partition policy sees it."""

    name: str
    """In the joint graph."""
    op: str
    """ATen overload that computes it."""
    module: str
    """Path of the module in which it was written ("" if none)."""
    source: str
    """As `file.py:line`."""
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """Of its storage."""
    flops: int
    """Of computing it once from what the op reads."""


@dataclass(frozen=True)
class StoredPlan:
    """A plan that was made elsewhere, from its file."""

    path: str
    saved: tuple[str, ...]
    recomputed: tuple[str, ...]
    schedule: tuple[str, ...] | None
    limit: int | None
    """These four as of a PartitionPlan."""
    saved_bytes: int
    values: Mapping[str, str]
    """Each saved value in a line, with its operator, type and shape."""
    kernel: str
    """What the program was planned to run as, and so was rewritten for."""
    fingerprint: str
    """Of the whole program."""


@dataclass(frozen=True)
class PartitionPlan(Shown):
    """Which forward values cross to the backward, and why. Nodes are named as in the joint graph."""

    strategy: str
    saved: tuple[str, ...]
    """Values that the forward hands over, in program order; unmutated primals need no entry."""
    recomputed: tuple[str, ...] = ()
    """Forward values that the backward computes again, in program order. One that is saved as well is handed over for
    autograd alone, which notices a later write to it."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Of each saved and each recomputed value, why."""
    saved_bytes: int = 0
    """Of the distinct storages of `saved`; parameters, buffers and batch are never part of it."""
    budget: Budget | None = None
    """What was asked for; None where the strategy takes none."""
    schedule: tuple[str, ...] | None = None
    """The backward's calls in order; a value that is named again is computed again. None: the joint graph's order, with
    each recomputed value just before its first use."""
    curve: tuple[tuple[int, float], ...] = ()
    """(Peak in bytes, seconds of recompute) of each plan that a budget chooses from."""
    limit: int | None = None
    """The peak in bytes that the budget allows."""
    under_way: str = ""
    """What of collectives may be under way beside other calls, which it leaves room for; "" where nothing is said."""

    @property
    def runs_without_a_budget(self) -> bool:
        """Whether a program has this plan where nothing bounds its peak. It runs in the joint graph's order."""
        return self.schedule is None

    def __str__(self) -> str:
        lines = [
            f"{self.strategy}: {len(self.saved)} saved ({format_bytes(self.saved_bytes)}), "
            f"{len(self.recomputed)} recomputed"
        ]
        lines += [f"  save {name}: {self.reasons.get(name, '')}" for name in self.saved]
        lines += [f"  recompute {name}: {self.reasons.get(name, '')}" for name in self.recomputed]
        return "\n".join(lines)
