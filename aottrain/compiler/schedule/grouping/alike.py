"""Groups that are alike, as those of repeated blocks and of one program's many plans: each kind is lowered once.

Two groups are alike where their calls run the same ops by the same rules, on operands of the same layouts that are the
same values to each other, in the same loops, and where the same results are read outside. Their kernels then differ in
names alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from aottrain.compiler.lowering import rules_for
from aottrain.compiler.schedule.grouping.groups import Group, Member
from aottrain.compiler.schedule.layouts import layout_of, result_nodes
from aottrain.ir.graph import info, source_of, spec_of, value_of
from aottrain.ir.kernels.kernel import Constant, Instruction, KernelIR, draw_constants, is_draw, operands
from aottrain.ir.schedule import KernelCall
from aottrain.ir.sizes.polynomials import current_facts

_PLAIN = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_DRAWS = ("aottrain.philox_uniform.default", "aottrain.philox_normal.default")
# A kernel, with its buffers as numbers of the group's values, and the numbers of its draws.
_Kept = dict[Hashable, tuple[KernelIR, tuple[int, ...], tuple[int, ...]]]


class _Scope(threading.local):
    """What is kept in this thread; None where nothing is."""

    kernels: _Kept | None = None


_scope = _Scope()


@contextmanager
def sharing() -> Iterator[None]:
    """Inside, groups that are alike are lowered once."""
    if _scope.kernels is not None:
        yield
        return
    _scope.kernels = {}
    try:
        yield
    finally:
        _scope.kernels = None


def once_for_alike(lower: Callable[[], KernelCall], group: Group, name: str, escaping: set[fx.Node]) -> KernelCall:
    """The group lowered, or the kernel of a group that is alike under the names of this one. escaping: the results that
    are read outside."""
    kept = _scope.kernels if current_facts() is None else None  # what open sizes are is said by names
    nodes = _Numbers()
    key = None if kept is None else _key(group, escaping, nodes)
    if kept is None or key is None:
        return lower()
    if key not in kept:
        made = lower()
        kept[key] = made.kernel, tuple(nodes.of(node) for node in made.buffers), tuple(nodes.draws)
        return made
    kernel, numbers, draws = kept[key]
    body = _with_draws(kernel, dict(zip(draws, nodes.draws, strict=True)))
    if body is None:
        return lower()
    buffers = tuple(nodes.nodes[number] for number in numbers)
    parameters = tuple(replace(p, name=node.name) for p, node in zip(kernel.parameters, buffers, strict=True))
    return KernelCall(replace(kernel, name=name, parameters=parameters, body=body, sources=sources_of(group)), buffers)


def _with_draws(kernel: KernelIR, draws: dict[int, int]) -> tuple[Instruction, ...] | None:
    """The body with other numbers of draws; None where one is also a number of something else, so that a kernel of its
    own would have one constant more, or less."""
    if all(old == new for old, new in draws.items()):
        return kernel.body
    numbers = set(draw_constants(kernel))
    counted = {i.args[1] for i in kernel.body if is_draw(i)}
    read = {value for n, i in enumerate(kernel.body) if n not in counted for value in operands(i)}
    written = {each.value for each in kernel.results}
    others = {i.value for n, i in enumerate(kernel.body) if isinstance(i, Constant) and n not in numbers}
    if numbers & (read | written) or others.intersection(draws.values()):
        return None
    return tuple(
        replace(i, value=draws[int(i.value)]) if n in numbers and isinstance(i, Constant) else i
        for n, i in enumerate(kernel.body)
    )


def sources_of(group: Group) -> tuple[str, ...]:
    """The calls of a kernel, each with the user's line."""
    return tuple(f"{m.node.name} = {info(m.node).name}{_line(m.node)}" for m in group.members)


class _Numbers:
    """Values in the order in which they are met."""

    def __init__(self) -> None:
        self.nodes: list[fx.Node] = []
        self.draws: list[int] = []
        """The numbers of its random draws, which are arguments of a kernel's call."""
        self._numbers: dict[fx.Node, int] = {}

    def of(self, node: fx.Node) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[node]


class _Unlike(Exception):
    """The group is like no other, as far as is known."""


def _key(group: Group, escaping: set[fx.Node], nodes: _Numbers) -> Hashable | None:
    try:
        members = tuple(_member(member, group, escaping, nodes) for member in group.members)
        # Values are described in the order of their numbers; their buffers get the numbers that follow.
        values = tuple(map(_value, list(nodes.nodes), [nodes] * len(nodes.nodes)))
        buffers = tuple(map(_buffer, nodes.nodes[len(values) :]))
    except _Unlike:
        return None
    return members, values, buffers, tuple(group.loops.items()), group.inner


def _member(member: Member, group: Group, escaping: set[fx.Node], nodes: _Numbers) -> Hashable:
    node, rule = member.node, member.rule
    number = next((i for i, other in enumerate(rules_for(node)) if other is rule), None)
    if number is None:  # a rule that computes an operand itself
        raise _Unlike
    given = node.args
    if info(node).name in _DRAWS and isinstance(given[1], int):
        if given[1] not in nodes.draws:
            nodes.draws.append(given[1])
        given = given[0], "draw", nodes.draws.index(given[1]), *given[2:]
    arguments = _part(given, nodes), tuple((name, _part(value, nodes)) for name, value in node.kwargs.items())
    results = tuple(
        None if item is None else (nodes.of(item), item in escaping, group.values[item])
        for item in result_nodes(node, rule)
    )
    return info(node).name, number, arguments, results, member.index, member.stage


def _part(value: Any, nodes: _Numbers) -> Hashable:
    if isinstance(value, fx.Node):
        return "value", nodes.of(value)
    if isinstance(value, (tuple, list)):
        return tuple(_part(item, nodes) for item in value)
    if isinstance(value, float):
        return repr(value)  # 0.0 is -0.0
    if isinstance(value, _PLAIN):
        return type(value), value  # 1 is True
    raise _Unlike


def _value(node: fx.Node, nodes: _Numbers) -> Hashable:
    """What lowering knows of an operand or a result."""
    layout = layout_of(node)
    if layout is None:
        raise _Unlike
    return _buffer(node), nodes.of(layout.root), layout.shape, layout.stride, layout.start


def _buffer(node: fx.Node) -> Hashable:
    spec = spec_of(node)
    if spec is None:
        raise _Unlike
    return spec, node.op == "placeholder", int(value_of(node).storage_offset())


def _line(node: fx.Node) -> str:
    source = source_of(node)
    return f"  {source}" if source else ""
