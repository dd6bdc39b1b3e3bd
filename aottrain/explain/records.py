"""What pages and pictures show of a program besides its report, as plain data: what runs and what flows between, its
generated kernels, what was not fused, and what it says to other processes."""

from __future__ import annotations

from collections.abc import Iterator
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
    needed_bytes: int = 0
    """Of all its runs in one step, those that come from or go to something else than a generated kernel: what it would
    move if it were one kernel with all its neighbours."""

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


@dataclass(frozen=True)
class Collective:
    """A call that talks to other processes, with its times by the cost model: seconds from the start of its half."""

    half: str
    call: str
    """The operator with the types of its operands: the same in all processes."""
    is_sum: bool
    num_bytes: int
    """That it brings to each process from the others."""
    start_s: float
    """When it is started."""
    wait_s: float
    """When the program begins to wait for it."""
    link_s: float
    """For how long it is on the link, on which one follows the other."""
    exposed_s: float
    """For how long the program waits; the rest is hidden behind what it computes."""

    @property
    def hidden_s(self) -> float:
        return max(self.link_s - self.exposed_s, 0.0)

    def __str__(self) -> str:
        return f"{self.half}: {self.call}"


@dataclass(frozen=True)
class Collectives:
    """All of a program, in the order in which they are started."""

    calls: tuple[Collective, ...] = ()
    forward_s: float = 0.0
    """Of the whole half, by the cost model, with what it waits."""
    backward_s: float = 0.0

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def num_bytes(self) -> int:
        return sum(call.num_bytes for call in self.calls)

    @property
    def link_s(self) -> float:
        return sum(call.link_s for call in self.calls)

    @property
    def exposed_s(self) -> float:
        return sum(call.exposed_s for call in self.calls)

    @property
    def first_sum(self) -> float | None:
        """After which share of the backward the first gradients leave; None where none do within it."""
        starts = [call.start_s for call in self.calls if call.is_sum and call.half == BACKWARD]
        return starts[0] / self.backward_s if starts and self.backward_s else None
