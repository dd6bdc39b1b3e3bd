"""What `fuse` works with: the groups found so far, what depends on what, and whether a call joins a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from aottrain.compiler.lowering import Rule
from aottrain.compiler.schedule.grouping.groups import Group, Placement, join, place, preferred, too_large
from aottrain.compiler.schedule.grouping.inlining import Inlining


@dataclass
class Fusion:
    """The groups of a graph."""

    groups: list[Group] = field(default_factory=list)
    group_of: dict[fx.Node, Group] = field(default_factory=dict)
    """The group of each fused call."""
    inlined: Inlining = field(default_factory=Inlining)
    """Calls that are computed where they are read."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a call and its producer are not one kernel, by the call's name."""


@dataclass
class Dependencies:
    """Which units of work (a group, or a call on its own) depend on which, as bit sets over their numbers."""

    ancestors: list[int] = field(default_factory=list)
    """For each unit, all that it depends on."""
    unit_of: dict[fx.Node, int] = field(default_factory=dict)
    """The unit that computes each node."""

    def new(self, sources: int) -> int:
        self.ancestors.append(sources)
        return len(self.ancestors) - 1

    def closure(self, units: Iterable[int]) -> int:
        bits = 0
        for unit in units:
            bits |= self.ancestors[unit] | (1 << unit)
        return bits

    def allows(self, unit: int, sources: Iterable[int]) -> bool:
        """Whether nothing that the sources need, themselves aside, depends on the unit."""
        return all(source == unit or not (self.ancestors[source] >> unit) & 1 for source in sources)

    def lies_between(self, unit: int, later: int) -> bool:
        """Whether something that the later one depends on depends on the unit."""
        above, own = self.ancestors[later], 1 << unit
        while above:  # the last first: what depends on the unit mostly comes after it
            other = above.bit_length() - 1
            if self.ancestors[other] & own:
                return True
            above ^= 1 << other
        return False

    def floats(self, group: Group) -> bool:
        """Whether a group reads nothing of the size of what it makes, as draws, and nothing depends on it yet: it may
        as well be made where it is read."""
        return not group.reads and not any((above >> group.number) & 1 for above in self.ancestors)

    def needs(self, sources: set[int], others: Sequence[Group]) -> set[int]:
        """The sources, with what the others depend on in their place."""
        needed = sources - {other.number for other in others}
        for other in others:
            # Of any number: a group that took over the calls of later ones needs what these needed.
            needed |= {unit for unit in range(len(self.ancestors)) if (self.ancestors[other.number] >> unit) & 1}
        return needed

    def add(self, unit: int, sources: set[int]) -> None:
        """The unit now also depends on these sources, and so does what depends on the unit."""
        extra = self.closure(sources - {unit}) & ~self.ancestors[unit]
        if not extra:
            return
        self.ancestors[unit] |= extra
        for other, above in enumerate(self.ancestors):
            if (above >> unit) & 1:
                self.ancestors[other] = above | extra

    def merge(self, unit: int, into: int) -> None:
        """The unit's work is done by another one that depends on it."""
        own, joined = 1 << unit, self.ancestors[into] & ~(1 << unit)
        self.ancestors[into] = joined
        for other, above in enumerate(self.ancestors):
            if above & own:
                self.ancestors[other] = (above & ~own) | joined | (1 << into)


def joins(group: Group, node: fx.Node, rules: Sequence[Rule], fusion: Fusion) -> bool:
    if too_large(group):
        fusion.reasons[node.name] = f"group {group.number} has as many buffers as a kernel may have"
        return False
    placed = find_place(group, node, rules)
    if isinstance(placed, Placement):
        join(group, node, placed)
        return True
    fusion.reasons[node.name] = f"not with {group.members[-1].node.name}: {placed}"
    return False


def find_place(group: Group, node: fx.Node, rules: Sequence[Rule]) -> Placement | str:
    """Where it would sit by the first of its rules that fits, or why it does not by the last one."""
    placed: Placement | str = "it has no rule"
    for rule in preferred(node, rules) if group.inner is None else rules:
        placed = place(group, node, rule)
        if isinstance(placed, Placement):
            break
    return placed
