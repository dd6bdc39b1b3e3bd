"""One compiled program: a forward and a backward runner behind a torch.autograd.Function, and the state epilogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from aottrain.compat import disable_autocast, saved_tensors
from aottrain.errors import UnsupportedError
from aottrain.ir.calling import NO_LINKS, Links
from aottrain.ir.tensor import TensorSpec
from aottrain.ops.random.philox import new_state
from aottrain.runtime.autograd.call import Call
from aottrain.runtime.autograd.chain import WHOLE, Chain, LinkState, write
from aottrain.runtime.autograd.double_backward import (
    Replay,
    differentiable_at_links,
    differentiable_gradients,
    found_again,
)
from aottrain.runtime.autograd.hooks import skip_undefined
from aottrain.runtime.copies import copy_each
from aottrain.runtime.executor import Runner, laid_out
from aottrain.runtime.faults import Faults

NO_SIZES: Mapping[str, int] = {}

Pattern = tuple[bool, ...]
Counts = tuple[int, ...]  # how many parts of each link's total, and of each gradient (0 or 1), a cut backward returns


@dataclass(frozen=True)
class Backward:
    """A backward for one pattern of defined tangents."""

    run: Runner
    reads: tuple[bool, ...]
    """Which residuals it reads; the others may be None."""


@dataclass
class Program:
    """What runs for one set of guards."""

    forward: Runner
    """[primals, constants, sizes, rng] -> [outputs, updates, residuals]."""
    build_backward: Callable[[Pattern], Backward] | None
    """Given which tangents are defined: [sizes, residuals, defined tangents] -> [gradients]. A gradient that no defined
    tangent reaches is None (law 6)."""
    num_outputs: int
    """The computed tensors and, after them, the new values of `replaced`."""
    replaced: tuple[int, ...]
    """The primals whose new values gradients flow through."""
    update_targets: tuple[int, ...]
    """The primal that each update is written to."""
    unversioned: tuple[int, ...]
    """The primals that are written without a new version, as by .data."""
    differentiable: tuple[bool, ...]
    """Of each output."""
    gradient_targets: tuple[int, ...]
    """The primal of each gradient."""
    cut_off: frozenset[int]
    """Primals that require a gradient and never get one, as where the program only detaches them. Autograd does not see
    that they are inputs."""
    isolated: frozenset[int]
    """Outputs that require gradients which come to no primal. They are no part of the backward."""
    anchored: bool
    """Outputs require gradients, and all primals are cut off: autograd would see no input at all."""
    output_specs: tuple[TensorSpec, ...]
    """Of each output. A tangent is brought to its output's strides."""
    device: torch.device
    draws: bool
    constants: tuple[Tensor, ...] = ()
    replay: Replay | None = None
    """The forward as differentiable ops, for a backward that is itself differentiated."""
    size_names: tuple[str, ...] = ()
    """The symbols of a program with symbolic sizes."""
    viewed: frozenset[int] = frozenset()
    """Outputs of which the caller gets views by their traced strides."""
    faults: Faults = field(default_factory=Faults)
    """Of the compiler."""
    links: Links = NO_LINKS
    """Results through which gradients of others pass."""
    watched: tuple[int, ...] = ()
    """Primals that must be in the backward as they were, whether it reads them or not."""
    saved_state: tuple[tuple[int, ...], ...] = ()
    """Of each output the primals that must be in its backward as the program has updated them; () where none are."""
    build_cut: Callable[[Pattern, Counts], Backward] | None = None
    """The backward cut at the links: [sizes, residuals, tangents, totals at links] -> [what has come to each link,
    gradients]. What the counts leave out is None."""
    _backwards: dict[Any, Backward] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Outputs in autograd's order: those that require gradients first. One that does so alone stands where the only
        result of an op does; torch takes another's place for that one once it has been written to."""
        self._order = sorted(range(len(self.differentiable)), key=lambda i: not self.differentiable[i])
        self._positions = [self._order.index(i) for i in range(len(self._order))]
        self._has_several_results = sum(self.differentiable) > 1
        self._constants = [i for i, flag in enumerate(self.differentiable) if not flag]

    def __call__(self, primals: Sequence[Tensor], sizes: Mapping[str, int] = NO_SIZES) -> Sequence[Tensor]:
        """The outputs; state updates are written to their primals after everything has been computed."""
        link_state, updates, inference = LinkState(), list[Tensor](), torch.is_inference_mode_enabled()
        state = new_state(self.device) if self.draws else None
        differentiates = self.build_backward is not None and not inference
        with disable_autocast():
            if not differentiates:
                with torch.no_grad():
                    outputs = _apart(self.run_forward(state, sizes, primals, updates)[: self.num_outputs])
            else:
                call = Call(self, state, sizes, updates, link_state, found_again(self, primals))
                inputs = [value.detach() if i in self.cut_off else value for i, value in enumerate(primals)]
                inputs += [torch.empty(0, requires_grad=True)] if self.anchored else []
                with torch.enable_grad():
                    results = _applied(call, inputs)
                outputs = [results[position] for position in self._positions]
            for i in () if inference else self.isolated:
                outputs[i] = _without_inputs(outputs[i])
            # Through .data only where the program did so: version counters must move, so that eager's errors on stale
            # saved values are raised.
            if updates:
                with torch.no_grad():
                    targets = [primals[i].data if i in self.unversioned else primals[i] for i in self.update_targets]
                    copy_each(targets, updates)
                    if differentiates and self.saved_state:
                        call.note_written(primals)
            if self.links.links and differentiates:
                replaced = [primals[i] for i in self.replaced]
                return Chain(self.links, outputs, results[0].grad_fn, link_state, replaced, _Relay, self._with_own_node)
            for target, value in zip(self.replaced, outputs[self.num_outputs - len(self.replaced) :], strict=True):
                write(primals[target], value)
            return [self._with_own_node(value) for value in outputs[: self.num_outputs - len(self.replaced)]]

    def _with_own_node(self, value: Tensor) -> Tensor:
        """A result as the only one of its node, as in eager. Of a node of several, hooks are called with None where
        another result is taken backward, and torch loses the hook of `retain_grad()` of any but the first where the
        caller writes to the tensor in place (an internal assertion)."""
        if value.grad_fn is None or not self._has_several_results:
            return value
        with torch.enable_grad():
            return _PassThrough.apply(value)

    def run_forward(
        self, state: Tensor | None, sizes: Mapping[str, int], primals: Sequence[Tensor], updates: list[Tensor]
    ) -> list[Tensor]:
        """Outputs, then residuals. The state updates are added to `updates`."""
        results = self.forward([*primals, *self.constants, *self.symbols(sizes), state])
        end = self.num_outputs + len(self.update_targets)
        updates.extend(results[self.num_outputs : end])
        del results[self.num_outputs : end]
        for i in self.viewed:
            # Fake tensors and kernels disagree on some strides.
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

    @property
    def only_gradients(self) -> Pattern:
        """Counts of a cut backward that returns all gradients, and nothing for the links."""
        return (*(False for _ in self.links.links), *(True for _ in self.gradient_targets))

    def cut_for(self, defined: Pattern, counts: Counts) -> Backward:
        backward = self._backwards.get((defined, counts))
        if backward is None:
            assert self.build_cut is not None
            backward = self._backwards[defined, counts] = self.build_cut(defined, counts)
        return backward


def _apart(results: Sequence[Tensor]) -> list[Tensor]:
    """The results as views of nothing: those that are views in eager are made from them.

    Views of a view made here would be views of a tensor inside, which autograd takes for a leaf; and nothing that
    requires a gradient could be added to it in place.
    """
    return [value.detach() if value._is_view() else value for value in results]


class _CompiledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *primals: Tensor) -> Any:
        program = call.program
        results = program.run_forward(call.state, call.sizes, primals[: len(call.inputs)], call.updates)
        outputs = _apart(results[: program.num_outputs])
        residuals = results[program.num_outputs :]
        ctx.call = call
        # Through save_for_backward: eager's version errors are still raised, and saved-tensor hooks see the values.
        if program._has_several_results or program.links.links:
            # Each may be unpacked on its own, or at a link's node, which an output of this very node cannot be.
            own = set(map(id, outputs))
            residuals = [value.detach() if id(value) in own else value for value in residuals]
        ctx.save_for_backward(*residuals, *(primals[i] for i in program.watched))
        if program._constants:
            ctx.mark_non_differentiable(*(outputs[i] for i in program._constants))
        ctx.set_materialize_grads(False)
        return tuple(outputs[i] for i in program._order)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        """None for the call, gradients of the primals, and None for what anchors it."""
        call: Call = ctx.call
        program = call.program
        tangents = tuple(tangents[position] for position in program._positions)
        if program.saved_state:
            call.check_written(tangents)
        mode = call.link_state.pop_mode() if program.links.links else WHOLE
        if torch.is_grad_enabled():
            return (None, *_handed_on(call, differentiable_gradients(ctx, tangents, mode)), None)
        tangents_and_specs = [
            (t, s) for t, s, d in zip(tangents, program.output_specs, program.differentiable, strict=True) if d
        ]
        if mode.cut:
            # What has come to a link is its total: gradients of other results have passed through it already.
            gradients = _run_cut(ctx, list(tangents), program.only_gradients)
            gradients = gradients[len(program.links.links) :]
            return (None, *_by_primal(call, gradients), None)
        backward = program.backward_for(tuple(tangent is not None for tangent, _ in tangents_and_specs))
        # Eager runs no formula of an unused output: what only those read may be stale, or its hook fail.
        inputs: list[Any] = [*program.symbols(call.sizes), *_unpacked(ctx, backward.reads)]
        # Unless the graph is retained, autograd drops the residuals here, and each dies at its last use (law 7).
        ctx.maybe_clear_saved_tensors()
        inputs += [
            None if tangent is None else _coerce(tangent, spec, call.sizes) for tangent, spec in tangents_and_specs
        ]
        del tangents, tangents_and_specs
        with disable_autocast():
            gradients = backward.run(inputs)
        return (None, *_by_primal(call, gradients), None)


class _Relay(torch.autograd.Function):
    """Above a result whose gradient passes through links. It hands its tangent to the program. Where the gradient at a
    link can be observed, it also hands the link what the tangent adds to that gradient."""

    @staticmethod
    def forward(
        ctx: Any, node: Any, link_state: LinkState, index: int, unasked: Tensor, value: Tensor, *links: Tensor
    ) -> Any:
        ctx.node, ctx.link_state, ctx.index = node, link_state, index
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  # none: but it raises where the graph is gone
        call: Call = ctx.node.call
        program = call.program
        reached = program.links.reached[ctx.index]
        if tangent is None:
            return (None,) * (5 + len(reached))
        mode = ctx.link_state.mode()
        if not mode.cut:
            return None, None, None, None, tangent, *(None for _ in reached)
        if torch.is_grad_enabled():
            values = differentiable_at_links(ctx.node, ctx.index, tangent, mode)
        else:
            tangents: list[Tensor | None] = [None] * len(program.output_specs)
            tangents[ctx.index] = tangent
            counts = tuple(reached.count(number) for number in range(len(program.links.links)))
            parts = iter(_run_cut(ctx.node, tangents, (*counts, *(0 for _ in program.gradient_targets))))
            values = [[next(parts) for _ in range(max(count, 1))] for count in counts]
        at_links = (value for number in dict.fromkeys(reached) for value in values[number])
        return None, None, None, None, tangent, *at_links


def _applied(call: Call, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results of the forward, or the error that it raises: torch hands on what C++ has warned of in it while the
    error is set, and Python then puts a SystemError in the error's place."""
    try:
        return list(_CompiledFunction.apply(call, *inputs))
    except SystemError as error:
        raised = error.__cause__
        if raised is None:
            raise
    raise raised from raised.__cause__


class _PassThrough(torch.autograd.Function):
    """A node of its own for a result that is not the first of its node, or has no node: hands its tangent on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor | None = None) -> Tensor:
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor | None) -> Any:
        return tangent, None


def _without_inputs(value: Tensor) -> Tensor:
    """A result that requires gradients which come to no input. A path from it to the program's inputs would change what
    autograd does there: a captured gradient passes a tensor's hooks first only where nothing lies behind it."""
    with torch.enable_grad():
        return _PassThrough.apply(value, torch.empty(0, requires_grad=True))


def _register_hook(node: Any, hook: Any) -> Any:
    raise UnsupportedError(_ONE_NODE.format("of all its ops: a hook behind it would see the gradients of its inputs"))


def _register_prehook(node: Any, hook: Any) -> Any:
    if hasattr(node, "link_state"):
        node.link_state.has_prehooks = True
    return BackwardCFunction.register_prehook(node, hook)


# Python asks these of the node that it holds; autograd itself calls neither.
_ONE_NODE = "a compiled program is one node of autograd's graph, {}; Tensor.register_hook shows what it does in eager"
for _function in (_CompiledFunction, _Relay, _PassThrough):
    _function._backward_cls.register_hook = _register_hook  # type: ignore[attr-defined]
    _function._backward_cls.register_prehook = _register_prehook  # type: ignore[attr-defined]


def _unpacked(node: Any, reads: Sequence[bool]) -> list[Tensor | None]:
    """What the forward has saved. RuntimeError: a backward, maybe of other results, has run already; or the caller has
    written to what is read or watched."""
    watched = node.call.program.watched
    try:
        saved = saved_tensors(node, (*reads, *(True for _ in watched)))
        return saved[: len(saved) - len(watched)]
    except RuntimeError as error:
        if "a second time" not in str(error) or not node.call.program._has_several_results:
            raise
        why = "Results of a compiled program are one node of that graph: one of them after another needs it, too."
        raise RuntimeError(f"{error} {why}") from None


def _run_cut(node: Any, tangents: list[Tensor | None], counts: Counts) -> list[Tensor | None]:
    """What the cut backward makes of the outputs' tangents; that of an output which is a link is its total there."""
    call: Call = node.call
    program = call.program
    at_links: list[Tensor | None] = []
    for link in program.links.links:
        total = None
        if link.computed >= 0 and (total := tangents[link.computed]) is not None:
            total, tangents[link.computed] = _coerce(total, program.output_specs[link.computed], call.sizes), None
        at_links.append(total)
    outputs = [
        None if tangent is None else _coerce(tangent, spec, call.sizes)
        for tangent, spec, flag in zip(tangents, program.output_specs, program.differentiable, strict=True)
        if flag
    ]
    inputs = [*outputs, *at_links]
    backward = program.cut_for(tuple(value is not None for value in inputs), counts)
    with disable_autocast():
        return backward.run([*program.symbols(call.sizes), *_unpacked(node, backward.reads), *inputs])


def _by_primal(call: Call, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    by_primal = dict(zip(call.program.gradient_targets, gradients, strict=True))
    return _handed_on(call, [by_primal.get(i) for i in range(len(call.inputs))])


def _handed_on(call: Call, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients of the primals, as autograd gets them."""
    skip_undefined(call.inputs[i][0]() for i, gradient in enumerate(gradients) if gradient is None)
    return gradients


@cache
def keep_dynamo_out() -> None:
    """From now on TorchDynamo does not trace a backward, which it does in a function that calls .backward().

    Only once it is in use: to import it takes a second that most programs need not spend.
    """
    for function in (_CompiledFunction, _Relay, _PassThrough):
        function.backward = staticmethod(torch.compiler.disable(function.backward))


def _coerce(tangent: Tensor, spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    """A dense tangent with the strides that the backward was traced for, no lazy conjugate or negative."""
    if tangent.layout is not torch.strided:
        tangent = tangent.to_dense()
    tangent, (_, strides) = tangent.resolve_conj().resolve_neg(), spec.layout(sizes)
    return tangent if tangent.stride() == strides else laid_out(tangent, strides)
