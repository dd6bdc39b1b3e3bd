"""What one attempt to compile a call came to: a program with its guards, or the reason why there is none."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from torch import Tensor

from aottrain.compat import tree_unflatten
from aottrain.compiler.capture.capture import CapturedStep
from aottrain.compiler.capture.dynamic import SizeGuard
from aottrain.compiler.joint.analysis import Analysis
from aottrain.errors import UnsupportedError
from aottrain.explain.report import GraphReport
from aottrain.guards.guards import describe, is_disjoint
from aottrain.guards.state import StateGuard
from aottrain.runtime.epilogue import assemble
from aottrain.runtime.program import NO_SIZES, Program


class Entry:
    """One compiled program with what it needs to be called. It keeps no parameter or buffer alive: where one is
    replaced, it is freed, and this program with it."""

    def __init__(
        self, program: Program, step: CapturedStep, analysis: Analysis, guard: StateGuard, report: GraphReport
    ):
        self.program = program
        self.analysis = analysis
        self.report = report
        self.guard = guard
        self.assigned = None if guard.assigned is None else guard.assigned.settle()
        read = () if self.assigned is None else self.assigned.inputs()
        state = step.primals[: step.num_state]
        self._state = tuple(map(weakref.ref, state))
        # Of tensors that each call finds in other objects: the place in the state, and in what the guard reads.
        places = {id(tensor): place for place, tensor in enumerate(read)}
        self._read = [(i, places[id(tensor)]) for i, tensor in enumerate(state) if id(tensor) in places]
        self._index_in_state = {id(tensor): i for i, tensor in enumerate(state) if id(tensor) not in places}
        self._places = places
        self.num_batch = len(step.primals) - step.num_state
        # The index in the state of each distinct tensor argument that is part of it; else -1.
        self.state_indices: tuple[int, ...] = ()
        # Where the key leaves sizes open: the guard of a program with symbolic sizes, or the only sizes that it is for.
        self.size_guard: SizeGuard | None = None
        self.shapes: tuple[Any, ...] | None = None

    def _find_state_indices(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Which state each argument is, or -1: a parameter that is passed to its own module is one input, not two."""
        return tuple(map(self._index_in_state.get, map(id, tensors), repeat(-1)))

    def bind(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """The primals of a call that this program is for; None where it is not."""
        if not self._accepts_sizes(tensors) or not self.guard.holds():
            return None
        if self.assigned is not None and not self.assigned.fit():
            return None
        state_indices = self._find_state_indices(tensors)
        primals = self._primals(tensors, state_indices)
        if state_indices != self.state_indices or primals is None:
            return None
        return primals if not self.analysis.mutated or is_disjoint(primals, self.analysis.mutated) else None

    def settle(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The primals of the call that was compiled. From now on guarded objects may be freed. Raises UnsupportedError
        where a tensor that each call finds in another object was here one that others know, too."""
        if any(id(tensor) in self._places for tensor in tensors) or not self.guard.seen.isdisjoint(self._places):
            raise UnsupportedError("the program assigns an attribute whose tensor is an argument, too, or another's")
        self._places = {}
        self.state_indices = self._find_state_indices(tensors)
        primals = self._primals(tensors, self.state_indices)
        assert primals is not None
        self.guard.release()
        return primals

    def _accepts_sizes(self, tensors: Sequence[Tensor]) -> bool:
        if self.size_guard is not None:
            return self.size_guard.holds(tensors)
        return self.shapes is None or self.shapes == tuple(map(describe, tensors))

    def _primals(self, tensors: Sequence[Tensor], state_indices: Sequence[int]) -> list[Tensor] | None:
        state: list[Any] = [reference() for reference in self._state]
        if self._read and self.assigned is not None:
            read = self.assigned.inputs()
            for i, place in self._read:
                state[i] = read[place]
        if any(value is None for value in state):
            return None
        batch = {id(tensor): tensor for tensor, index in zip(tensors, state_indices, strict=True) if index < 0}
        return [*state, *batch.values()]

    def __call__(self, tensors: Sequence[Tensor], primals: list[Tensor]) -> Any:
        sizes = NO_SIZES if self.size_guard is None else self.size_guard.sizes.read(tensors)
        computed = self.program(primals, sizes)
        analysis = self.analysis
        leaves = assemble(analysis.outputs, analysis.leaves, analysis.is_tensor, computed, primals, sizes)
        out = tree_unflatten(leaves, analysis.out_tree)
        return out if self.assigned is None else self.assigned.put(out)


Bound = tuple[Entry, list[Tensor]]


@dataclass(frozen=True)
class Refusal:
    """A call that cannot be compiled: where this guard holds, that is known without another trace."""

    guard: StateGuard
    reason: str
    source: str

    def error(self) -> UnsupportedError:
        return UnsupportedError(self.reason, source=self.source)
