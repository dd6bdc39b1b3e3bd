"""Results of one call whose gradients pass through other results of it, as a chain of autograd nodes.

Of `return hidden, loss` the loss gets a node above the program's own. Its tangent goes to the program, and what it adds
to the gradient at `hidden` goes to `hidden`. So autograd adds up, hooks and captures at `hidden` as it does in eager.

The gradient at `hidden` may be unobserved: no hook, no retain_grad, and a plain backward(), which captures nothing on
its way. Then nothing is handed to `hidden`, and the program's backward runs whole, from the loss's tangent. It is as
fast, and takes as little memory, as if there were no chain. What is decided for one run of a backward holds for all of
its nodes.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from aottrain.compat import backward_number, runs_in_this_backward
from aottrain.errors import UnsupportedError
from aottrain.ir.calling import Links

Make = Callable[[int], tuple[Tensor, list[Tensor]]]

# Backwards of one call that have begun and have not reached its program: they may never do so.
_MOST_RUNS = 16


@dataclass(frozen=True)
class LinkMode:
    """How one run of a backward takes the links."""

    cut: bool
    """The gradient at a link can be observed: the backward is cut at the links."""
    alive: frozenset[int] = frozenset()
    """Under create_graph, the links that the caller still has."""


WHOLE = LinkMode(False)


@dataclass
class LinkState:
    """The links of one call, by number."""

    tensors: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    hooks: dict[int, OrderedDict[int, Any]] = field(default_factory=dict)
    """Hooks on the links, also on those that the caller no longer has."""
    bases: dict[int, list[tuple[weakref.ref[Tensor], OrderedDict[int, Any]]]] = field(default_factory=dict)
    """What each link is a view of, with hooks: the gradient at a link goes on to them."""
    has_prehooks: bool = False
    """On the node of a link, where no tensor shows them; it may be that they were removed."""
    runs: dict[int, LinkMode] = field(default_factory=dict)
    """By the number of a run of a backward, what was decided for it."""

    def add(self, number: int, tensor: Tensor, bases: Sequence[Tensor]) -> None:
        """bases: what it is a view of, but for inputs that the program has not replaced."""
        for value in (tensor, *bases):
            if isinstance(value.grad_fn, BackwardCFunction):
                value.grad_fn.link_state = self  # type: ignore[attr-defined]
        self.tensors[number] = weakref.ref(tensor)
        self.versions[number] = tensor._version
        self.hooks[number] = _hooks_of(tensor)
        self.bases[number] = [(weakref.ref(base), _hooks_of(base)) for base in bases]

    def mode(self) -> LinkMode:
        """What holds for the backward that runs now."""
        run = backward_number()
        if run not in self.runs:
            while len(self.runs) >= _MOST_RUNS:
                self.runs.pop(next(iter(self.runs)))
            self.runs[run] = self._decide()
        return self.runs[run]

    def pop_mode(self) -> LinkMode:
        """The same, at the end of the chain; where no node of it has run there is nothing to cut."""
        mode = self.runs.pop(backward_number(), WHOLE)
        if not mode.cut and mode is not WHOLE and any(map(self._has_hooks, self.hooks)):
            raise UnsupportedError("a hook was added to a result while gradients of others already passed through it")
        return mode

    def _decide(self) -> LinkMode:
        alive = {number: tensor for number, reference in self.tensors.items() if (tensor := reference()) is not None}
        if torch.is_grad_enabled():
            if any(self._has_hooks(number) for number in self.hooks if number not in alive):
                raise UnsupportedError("create_graph=True needs a result that has hooks, and it is gone")
            return LinkMode(True, frozenset(alive))
        captures = not runs_in_this_backward(_UNASKED_NODE)
        bases = (reference() for pairs in self.bases.values() for reference, _ in pairs)
        retained = any(tensor.retains_grad for tensor in (*alive.values(), *bases) if tensor is not None)
        return LinkMode(captures or retained or self.has_prehooks or any(map(self._has_hooks, self.hooks)))

    def _has_hooks(self, number: int) -> bool:
        """At the link, or where its gradient goes on to."""
        return bool(self.hooks[number]) or any(hooks for _, hooks in self.bases[number])

    def stand_ins(self, mode: LinkMode) -> dict[int, Tensor]:
        """The caller's own tensors, as views at which an inner differentiation ends: hooks are for the outer one."""
        stand_ins = {}
        for number in mode.alive:
            tensor = self.tensors[number]()
            if tensor is None or tensor._version != self.versions[number]:
                raise UnsupportedError("create_graph=True needs the results of the forward as they were")
            stand_ins[number] = tensor.view_as(tensor)
        return stand_ins


def _hooks_of(tensor: Tensor) -> OrderedDict[int, Any]:
    """As Tensor.register_hook begins: what it adds, until a write in place, is seen here."""
    if tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict()
        tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    return tensor._backward_hooks


# No gradient at this leaf is ever asked for: a backward runs its node only where it captures nothing.
_UNASKED = torch.zeros((), requires_grad=True).view(())
_UNASKED_NODE = _UNASKED.grad_fn


class _Written(torch.autograd.Function):
    """An input takes its new value, with the gradient of that. `copy_` would give the old value a gradient of zeros:
    added to its other gradients, they turn -0.0 into 0.0."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(target)
        return target.copy_(value)

    @staticmethod
    def backward(ctx: Any, tangent: Tensor | None) -> Any:
        return None, tangent


def write(target: Tensor, value: Tensor) -> None:
    """In place, and autograd goes on from there as from the value."""
    _Written.apply(target, value)


class Chain(Sequence[Tensor]):
    """The computed outputs of one call. Each gets the node that links it to others when it is first read.

    outputs: as the program gave them, then the new values of `replaced`, inputs that they are written to. node: the
    program's own. relay: the autograd function of linked outputs. own_node: gives another output a node of its own.
    """

    def __init__(
        self,
        links: Links,
        outputs: list[Tensor],
        node: Any,
        state: LinkState,
        replaced: Sequence[Tensor],
        relay: Any,
        own_node: Callable[[Tensor], Tensor],
    ):
        self.links, self.state, self.replaced, self.relay, self.own_node = links, state, replaced, relay, own_node
        self._outputs: list[Tensor | None] = list(outputs)
        self._linked: dict[int, Tensor] = {}
        self._tensors: dict[int, Tensor] = {}
        self._make: Make | None = None
        self._node = node

    def __len__(self) -> int:
        return len(self._outputs) - len(self.replaced)

    def __getitem__(self, index: Any) -> Any:
        tensor = self._linked.get(index)
        if tensor is None:
            value = self._outputs[index]
            self._outputs[index] = None
            numbers = self.links.reached[index]
            tensors = [self._link(number) for number in numbers]
            assert value is not None
            if tensors:
                with torch.enable_grad():
                    tensor = self.relay.apply(self._node, self.state, index, _UNASKED, value, *tensors)
            else:
                tensor = self.own_node(value)
            self._linked[index] = tensor
        return tensor

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def updated(self, i: int) -> Tensor:
        """The i-th of the inputs that gradients flow through, with its new value."""
        index = len(self) + i
        if index not in self._linked:
            write(self.replaced[i], self[index])
            self._linked[index] = self.replaced[i]
        return self.replaced[i]

    def prepare(self, primal: Tensor) -> None:
        """Before an input is read: it gets its new value."""
        for i, value in enumerate(self.replaced):
            if value is primal:
                self.updated(i)

    def finish(self, make: Make) -> None:
        """Makes all links. make: the tensor of the result at a position, made of these outputs, and what that is a view
        of; not kept."""
        self._make = make
        for i in range(len(self.replaced)):
            self.updated(i)
        for number in range(len(self.links.links)):
            self._link(number)
        self._make = None

    def _link(self, number: int) -> Tensor:
        if number not in self._tensors:
            link = self.links.links[number]
            assert self._make is not None
            is_result = link.output >= 0
            tensor, bases = self._make(link.output) if is_result else (self.updated(link.computed - len(self)), [])
            self._tensors[number] = tensor
            self.state.add(number, tensor, bases)
        return self._tensors[number]
