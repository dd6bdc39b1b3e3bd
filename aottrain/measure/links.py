"""How fast the processes of a program talk to each other, for its plan: a collective takes a fixed time and its bytes.

All processes are told the same (`set_link`), so that they plan alike; what is not told is the default, on any machine.
To measure it all processes do what the first one says (`Talk`), whose clock it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from aottrain.ir.settings.decisions import BANDWIDTH, LATENCY, Decision, Timing
from aottrain.measure.decisions import decide, take
from aottrain.measure.rates import stepped
from aottrain.measure.stopwatch import Run
from aottrain.measure.timings import timed

_NUMBER, _MANY = "one number", "many bytes"
_BYTES = {"cpu": 1 << 23, "cuda": 1 << 27}  # that each process holds after a large gather
_WORDS = {_NUMBER: 1, _MANY: 2}
_END = 3


@dataclass(frozen=True)
class Link:
    """Between the processes of one group."""

    latency_s: float = 100e-6
    """Of one collective without bytes."""
    bytes_per_s: float = 1e9
    """That one process takes in."""
    size: int = 2
    """How many processes there are, where a collective does not say it."""
    decision: Decision | None = None
    """How the figures came about; None where they were given."""

    def seconds(self, num_bytes: float) -> float:
        """Of one collective that brings so many bytes to each process."""
        return self.latency_s + num_bytes / self.bytes_per_s


_known = [Link()]
_of_groups: dict[str, Link] = {}


def link(group: str = "") -> Link:
    """As all processes have been told; what is compiled has it among its decisions. group: of this name, where it has
    a link of its own."""
    found = _of_groups.get(group, _known[0])
    if found.decision is not None:
        take(found.decision)
    return found


def set_link(found: Link, of_groups: Mapping[str, Link] | None = None) -> None:
    """From now on, for all programs that this process compiles. of_groups: those that have another one, by name."""
    _known[0] = found
    _of_groups.clear()
    _of_groups.update(of_groups or {})


class Talk:
    """Collectives that the first process of a group asks for, one after the other: each begins with a sum of one
    number, which only the first one gives, and which says what follows. group: torch's; None is all processes."""

    def __init__(self, size: int, device: torch.device, group: Any = None):
        self.size, self.device, self.group = size, device, group
        self._word = torch.zeros(1, device=device)
        self._part: torch.Tensor | None = None

    @property
    def taken_in(self) -> int:
        """Bytes that each process is given by the others in a large gather."""
        return _BYTES[self.device.type] // self.size * (self.size - 1)

    def say(self, what: str) -> None:
        """By the first process; the others `follow`."""
        self._say(_WORDS[what])

    def end(self) -> None:
        self._say(_END)

    def follow(self) -> None:
        """Until the first one ends it."""
        while (word := self._say(0)) != _END:
            if word == _WORDS[_MANY]:
                self._gather()

    def _say(self, word: int) -> int:
        self._word.fill_(word)
        dist.all_reduce(self._word, group=self.group)
        if word == 0:
            return int(self._word)
        if word == _WORDS[_MANY]:
            self._gather()
        return word

    def _gather(self) -> None:
        if self._part is None:
            count = _BYTES[self.device.type] // self.size
            self._part = torch.zeros(count, dtype=torch.uint8, device=self.device)
            self._whole = torch.zeros(count * self.size, dtype=torch.uint8, device=self.device)
        dist.all_gather_into_tensor(self._whole, self._part, group=self.group)


def decide_link(talk: Talk, key: str) -> Decision:
    """By the first process, while the others follow: figures by name, in steps of two from those of the model."""

    def prefer(times: Mapping[str, Timing]) -> dict[str, float]:
        latency_s = times[_NUMBER].seconds
        bytes_s = max(times[_MANY].seconds - 2 * latency_s, 1e-9)  # it begins with a number, and has a latency itself
        return figures(Link(stepped(latency_s, Link.latency_s), stepped(talk.taken_in / bytes_s, Link.bytes_per_s)))

    runs = {name: Run(partial(talk.say, name)) for name in (_NUMBER, _MANY)}
    return decide("link", key, figures(Link()), partial(timed, "link", key, lambda: runs, talk.device), prefer)


def figures(of: Link) -> dict[str, float]:
    return {LATENCY: of.latency_s, BANDWIDTH: of.bytes_per_s}
