"""One compiled program: a forward and a backward runner behind a torch.autograd.Function, and the state epilogue."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import disable_autocast, saved_tensors
from aottrain.errors import UnsupportedError
from aottrain.ir.tensor import TensorSpec
from aottrain.runtime.executor import Runner, laid_out
from aottrain.runtime.faults import Faults
from aottrain.runtime.philox import new_state

NO_SIZES: Mapping[str, int] = {}

Pattern = tuple[bool, ...]
Replay = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Backward:
    """A backward for one pattern of defined tangents. reads: which residuals it reads; the others may be None."""

    run: Runner
    reads: tuple[bool, ...]


@dataclass
class Program:
    """What runs for one set of guards.

    forward: [primals, constants, sizes, rng] -> [outputs, updates, residuals]. build_backward(pattern): the backward
    for calls in which only the tangents marked True are defined: [sizes, residuals, tangents] -> [gradients]; gradients
    that no defined tangent reaches are None (law 6). size_names: the symbols of a program with symbolic sizes.
    num_outputs counts the computed tensors and, after them, the new values of the primals `replaced`, which gradients
    flow through. update_targets: the primal that each update is written to; unversioned: those
    written behind autograd's back. gradient_targets: the primal of each
    gradient. differentiable, output_specs: of each output; a tangent is brought to its output's strides.
    viewed: outputs of which the caller gets views by their traced strides.
    replay: the forward as differentiable ops, for a backward that is itself differentiated. faults: of the compiler.
    """

    forward: Runner
    build_backward: Callable[[Pattern], Backward] | None
    num_outputs: int
    replaced: tuple[int, ...]
    update_targets: tuple[int, ...]
    unversioned: tuple[int, ...]
    differentiable: tuple[bool, ...]
    gradient_targets: tuple[int, ...]
    output_specs: tuple[TensorSpec, ...]
    device: torch.device
    draws: bool
    constants: tuple[Tensor, ...] = ()
    replay: Replay | None = None
    size_names: tuple[str, ...] = ()
    viewed: frozenset[int] = frozenset()
    faults: Faults = field(default_factory=Faults)
    _backwards: dict[Pattern, Backward] = field(default_factory=dict)

    def __call__(self, primals: Sequence[Tensor], sizes: Mapping[str, int] = NO_SIZES) -> list[Tensor]:
        """The outputs; state updates are written to their primals after everything has been computed."""
        state = new_state(self.device) if self.draws else None
        updates: list[Tensor] = []
        with disable_autocast():
            if self.build_backward is None:
                with torch.no_grad():
                    outputs = self.run_forward(state, sizes, primals, updates)[: self.num_outputs]
            else:
                with torch.enable_grad():
                    outputs = list(_CompiledFunction.apply(self, state, sizes, updates, *primals))
            # Through .data only where the program did so: version counters must move, so that eager's errors on stale
            # saved values are raised.
            with torch.no_grad():
                for target, value in zip(self.update_targets, updates, strict=True):
                    (primals[target].data if target in self.unversioned else primals[target]).copy_(value)
            for target, value in zip(self.replaced, outputs[self.num_outputs - len(self.replaced) :], strict=True):
                primals[target].copy_(value)  # with gradients: the input continues from the program's output
        return outputs[: self.num_outputs - len(self.replaced)]

    def run_forward(
        self, state: Tensor | None, sizes: Mapping[str, int], primals: Sequence[Tensor], updates: list[Tensor]
    ) -> list[Tensor]:
        """Outputs, then residuals; the state updates go into the given list."""
        results = self.forward([*primals, *self.constants, *self.symbols(sizes), state])
        end = self.num_outputs + len(self.update_targets)
        updates.extend(results[self.num_outputs : end])
        del results[self.num_outputs : end]
        for i in self.viewed:
            # Fakes and kernels disagree on some strides.
            results[i] = _coerce(results[i], self.output_specs[i], sizes)
        return results

    def symbols(self, sizes: Mapping[str, int]) -> list[int]:
        return [sizes[name] for name in self.size_names]

    def backward_for(self, pattern: Pattern) -> Backward:
        backward = self._backwards.get(pattern)
        if backward is None:
            assert self.build_backward is not None
            backward = self._backwards[pattern] = self.build_backward(pattern)
        return backward


class _CompiledFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        program: Program,
        state: Tensor | None,
        sizes: Mapping[str, int],
        updates: list[Tensor],
        *primals: Tensor,
    ) -> Any:
        results = program.run_forward(state, sizes, primals, updates)
        # A view would make views of it, too, views of a tensor inside that autograd takes for a leaf.
        outputs = [value.detach() if value._is_view() else value for value in results[: program.num_outputs]]
        residuals = results[program.num_outputs :]
        ctx.program, ctx.sizes = program, sizes
        ctx.state, ctx.inputs = state, [(weakref.ref(value), value._version) for value in primals]
        # Through save_for_backward: eager's version errors are still raised, and saved-tensor hooks see the values.
        if sum(program.differentiable) > 1:
            # Each may be unpacked on its own, which an output of this very node cannot be.
            own = set(map(id, outputs))
            residuals = [value.detach() if id(value) in own else value for value in residuals]
        ctx.save_for_backward(*residuals)
        ctx.mark_non_differentiable(*(o for o, flag in zip(outputs, program.differentiable, strict=True) if not flag))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            return (None, None, None, None, *_differentiable_gradients(ctx, tangents))
        program: Program = ctx.program
        given = [(t, s) for t, s, d in zip(tangents, program.output_specs, program.differentiable, strict=True) if d]
        backward = program.backward_for(tuple(tangent is not None for tangent, _ in given))
        # Eager runs no formula of an unused output: what only those read may be stale, or its hook fail.
        inputs: list[Any] = [*program.symbols(ctx.sizes), *saved_tensors(ctx, backward.reads)]
        # Unless the graph is retained, autograd lets go of the residuals here, and each dies at its last use (law 7).
        ctx.maybe_clear_saved_tensors()
        inputs += [None if tangent is None else _coerce(tangent, spec, ctx.sizes) for tangent, spec in given]
        del tangents, given
        with disable_autocast():
            gradients = backward.run(inputs)
        by_primal = dict(zip(program.gradient_targets, gradients, strict=True))
        num_primals = len(ctx.needs_input_grad) - 4
        return (None, None, None, None, *(by_primal.get(i) for i in range(num_primals)))


@cache
def keep_dynamo_out() -> None:
    """From now on a backward is not looked into by TorchDynamo, which does so in a function that calls .backward().

    Only once it is in use: to import it takes a second that most programs need not spend.
    """
    _CompiledFunction.backward = staticmethod(torch.compiler.disable(_CompiledFunction.backward))


def _differentiable_gradients(ctx: Any, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients under create_graph=True: the forward runs again as ordinary ops, and autograd differentiates it.

    Raises UnsupportedError where the forward cannot be run again: see each message.
    """
    program: Program = ctx.program
    if program.replay is None:
        raise UnsupportedError(
            "create_graph=True through a program with a custom autograd.Function, updated state or rng='eager' draws"
        )
    primals = []
    for reference, version in ctx.inputs:
        value = reference()
        if value is None or value._version != version:
            raise UnsupportedError("create_graph=True needs the inputs of the forward, and one is gone or was modified")
        primals.append(value)
    with disable_autocast():
        outputs = program.replay([*primals, *program.constants, *program.symbols(ctx.sizes), ctx.state])
        pairs = [(o, t) for o, t in zip(outputs, tangents, strict=True) if t is not None and o.requires_grad]
        wanted = [i for i, value in enumerate(primals) if value.requires_grad and ctx.needs_input_grad[i + 4]]
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            [primals[i] for i in wanted],
            [tangent for _, tangent in pairs],
            create_graph=True,
            allow_unused=True,
        )
    by_primal = dict(zip(wanted, gradients, strict=True))
    return [by_primal.get(i) for i in range(len(primals))]


def _coerce(tangent: Tensor, spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    """A tangent with the strides that the backward was traced for, no lazy conjugate or negative."""
    tangent, (_, strides) = tangent.resolve_conj().resolve_neg(), spec.layout(sizes)
    return tangent if tangent.stride() == strides else laid_out(tangent, strides)
