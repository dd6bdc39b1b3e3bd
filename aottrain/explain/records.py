"""What pages and pictures show of a program besides its report, as plain data: what runs and what flows between, its
generated kernels, and what was not fused."""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"
# What a step is.
KERNEL, LIBRARY, INPUT, SAVED, GIVEN = "kernel", "library", "input", "saved", "given"
# What becomes of a value that the backward reads.
IS_SAVED, IS_RECOMPUTED = "saved", "recomputed"


@dataclass(frozen=True)
class Step:
    """What runs at one place of a program, or a value at its edge."""

    name: str
    """In the graph."""
    kind: str
    """KERNEL: a generated one; LIBRARY: an op that runs through a library; INPUT: the batch or a tangent; SAVED: a
    value that is kept between forward and backward; GIVEN: what the program gives."""
    label: str
    """What it computes, in a few words."""
    modules: tuple[tuple[str, int], ...] = ()
    """Whose calls it is within, the outermost first: path, and which of its runs this is, from 0."""
    half: str = FORWARD
    source: str = ""
    """As "file.py:line"."""
    type: str = ""
    """Of its result, as "float32[2, 3]"."""
    num_bytes: int = 0
    """Of the memory that it makes."""
    fate: str = ""
    """IS_SAVED, IS_RECOMPUTED, or "": of a value of the forward, what the backward does for it; IS_RECOMPUTED of a step
    of the backward that computes such a value again."""


@dataclass(frozen=True)
class Flow:
    """That one step reads what another made; positions among the steps."""

    start: int
    end: int
    num_bytes: int
    fate: str = ""
    """IS_SAVED or IS_RECOMPUTED of what crosses from the forward to the backward."""


@dataclass(frozen=True)
class Diagram:
    """One program, or one half of one, in program order."""

    title: str
    steps: tuple[Step, ...]
    flows: tuple[Flow, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.kind for step in self.steps))

    @property
    def fates(self) -> tuple[str, ...]:
        """Those that a step or a flow has."""
        found = dict.fromkeys([step.fate for step in self.steps] + [flow.fate for flow in self.flows])
        return tuple(fate for fate in found if fate)


@dataclass(frozen=True)
class KernelRecord:
    """One generated function, which one or more kernels of the program are."""

    names: tuple[str, ...]
    """Of the kernels, in the order in which they run."""
    ops: str
    """What it computes, in a few words."""
    lines: tuple[str, ...]
    """Of the user's program, as "file.py:line"."""
    formula: str
    """What it computes, value by value."""
    code: str
    """C++ or Triton."""
    moved_bytes: int
    """Of one run, where each element that it reads or writes moves once: the least that this kernel can move."""

    @property
    def total_bytes(self) -> int:
        """Of all its runs in one step."""
        return self.moved_bytes * len(self.names)


@dataclass(frozen=True)
class Refusal:
    """A fusion that was not made."""

    op: str
    """The call that was not joined to the kernel before it, the first of `count` alike."""
    reason: str
    count: int = 1
