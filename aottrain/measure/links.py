"""How fast the processes of a program talk to each other, for its plan: a collective takes a fixed time and its bytes.

All processes are told the same (`set_link`), so that they plan alike; what is not told is the default, on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Between the processes of one group."""

    latency_s: float = 100e-6
    """Of one collective without bytes."""
    bytes_per_s: float = 1e9
    """That one process takes in."""

    def seconds(self, num_bytes: float) -> float:
        """Of one collective that brings so many bytes to each process."""
        return self.latency_s + num_bytes / self.bytes_per_s


_known = [Link()]


def link() -> Link:
    return _known[0]


def set_link(found: Link) -> None:
    """From now on, for all programs that this process compiles."""
    _known[0] = found
