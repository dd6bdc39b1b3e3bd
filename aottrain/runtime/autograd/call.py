"""One call of a program, as its backward knows it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aottrain.ir.tensor import version_of
from aottrain.runtime.autograd.chain import LinkState
from aottrain.runtime.autograd.double_backward import FoundAgain


@dataclass(slots=True, eq=False)  # one is made for each call
class Call:
    program: Any
    state: Tensor | None
    """(seed, offset) of its random draws."""
    sizes: Mapping[str, int]
    updates: list[Tensor]
    """Where its state updates go."""
    link_state: LinkState
    inputs: tuple[FoundAgain, ...]
    written: dict[int, tuple[weakref.ref[Tensor], int | None]] = field(default_factory=dict)
    """Primals that the program has updated and eager's backward has saved so, with their versions since then."""

    def note_written(self, primals: Sequence[Tensor]) -> None:
        for i in {i for numbers in self.program.saved_state for i in numbers}:
            self.written[i] = weakref.ref(primals[i]), version_of(primals[i])

    def check_written(self, tangents: Sequence[Tensor | None]) -> None:
        """RuntimeError, as in eager, where a backward needs one that has been written since, by another call, say."""
        for tangent, numbers in zip(tangents, self.program.saved_state, strict=True):
            for reference, version in (self.written[i] for i in numbers if tangent is not None):
                value = reference()
                if value is not None and version_of(value) != version:
                    raise RuntimeError(
                        "one of the variables needed for gradient computation has been modified by an inplace "
                        f"operation: state of shape {list(value.shape)}, which the compiled program itself updates, is "
                        f"at version {version_of(value)}; expected version {version} instead."
                    )
