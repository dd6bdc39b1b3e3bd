"""Groups that are alike are lowered once; what differs in anything that lowering reads is not alike."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from aottrain.compiler import lowering
from aottrain.compiler.link.programs import plan_program
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.compiler.schedule import kernels
from aottrain.compiler.schedule.grouping import alike, fusion
from aottrain.compiler.schedule.grouping.alike import sharing
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.graph import JointGraph
from aottrain.ir.schedule import KernelCall, Schedule
from tests.compiler.programs import joint_of, leaf
from tests.zoo import FeedForward


def deep(dropout: float, depth: int) -> JointGraph:
    torch.manual_seed(0)
    blocks = (FeedForward(16, 32, dropout=dropout) for _ in range(depth))
    return joint_of(nn.Sequential(*blocks), torch.ones(8, 16))


def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are lowered from now on."""
    names: list[str] = []
    lower = kernels._lowered

    def counted(group, name, escapes):
        names.append(name)
        return lower(group, name, escapes)

    monkeypatch.setattr(kernels, "_lowered", counted)
    return names


def schedules(joint: JointGraph) -> list[Schedule]:
    return [each for _, _, each in plan_program(apply_partition(joint, plan_partition(joint, "min_cut")))]


def described(planned: Schedule) -> list[str]:
    return [repr((call.kernel, call.buffers)) if isinstance(call, KernelCall) else call.name for call in planned.calls]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_as_many_kernels_are_lowered_whatever_the_depth(monkeypatch, dropout):
    counts = {}
    for depth in (4, 8):
        joint = deep(dropout, depth)
        names = lowered(monkeypatch)
        with sharing():
            for _ in range(2):
                planned = schedules(joint)
        counts[depth] = len(names), sum(len(each.kernels) for each in planned)
        monkeypatch.undo()
    assert counts[8][0] == counts[4][0] and counts[8][1] > counts[4][1], counts


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_kernel_that_is_shared_is_the_one_that_its_group_gives(monkeypatch, dropout):
    joint = deep(dropout, 4)
    shared = list(map(described, schedules(joint)))
    monkeypatch.setattr(kernels, "once_for_alike", lambda lower, *_: lower())
    assert list(map(described, schedules(joint))) == shared


def kernels_of(function, *inputs: Tensor) -> list[str]:
    """The bodies of the kernels, without names."""
    return [
        repr((call.kernel.body, call.kernel.stores)) for call in schedule(joint_of(function, *inputs).graph).kernels
    ]


def test_what_differs_in_a_number_is_not_alike():
    """0.0 is equal to -0.0, 1 to 1.0 and True, and nan to nothing."""
    values = (0.0, -0.0, 1, 1.0, True, math.nan, math.inf)

    def times(value: float) -> list[str]:
        return kernels_of(lambda x: torch.full_like(x, value) * x, leaf(40, 50))

    alone = {repr(value): times(value) for value in values}
    with sharing():
        for value in (*values, *values):
            assert times(value) == alone[repr(value)], value
    assert alone["0.0"] != alone["-0.0"]


def one_operand(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x, x)


def two_operands(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x, y)


def other_order(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x, y.t())


def part(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x[:20], y[20:])


def other_part(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x[:20], y[:20])


def read_outside(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    larger = torch.maximum(x, y)
    return larger, larger.exp()


def read_inside(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x, y).exp()


PROGRAMS = (one_operand, two_operands, other_order, part, other_part, read_outside, read_inside)


def test_what_reads_other_memory_or_is_read_elsewhere_is_not_alike():
    inputs = leaf(40, 40), leaf(40, 40, seed=1)
    alone = [kernels_of(program, *inputs) for program in PROGRAMS]
    with sharing():
        for program, expected in zip((*PROGRAMS, *PROGRAMS), (*alone, *alone), strict=True):
            assert kernels_of(program, *inputs) == expected, program.__name__


def test_rules_read_nothing_of_a_call_that_its_key_leaves_out():
    """Its op, its arguments, the layouts of its operands and which of its results are read: what else a rule asks has
    to come into `alike._key`."""
    asked: set[str] = set()
    for path in Path(lowering.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "aottrain.ir.graph":
                asked.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Attribute) and node.attr in ("meta", "graph", "next", "prev", "users"):
                asked.add(f"{path.name}: .{node.attr}")
    # What `places` asks is whether a call has rules at all, and each member of a group has.
    asked -= {"places.py: .graph", "places.py: .users"}
    # Where a size is open (`is_size`) no group is like another.
    assert asked == {"info", "is_size", "required_spec", "spec_of", "value_of", "losses.py: .users"}


def test_nothing_is_kept_outside():
    with sharing(), sharing():
        schedule(joint_of(read_inside, leaf(40, 40), leaf(40, 40)).graph)
        assert alike._scope.kernels
    assert alike._scope.kernels is None
    groups = fusion.fuse(joint_of(read_inside, leaf(40, 40), leaf(40, 40)).graph).groups
    assert kernels.lower(groups[0]).kernel.name == "kernel"
    assert alike._scope.kernels is None
