"""What is computed where it is read: the same bits as eager's, and no memory in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aottrain.compiler.schedule.grouping import cheap
from aottrain.compiler.schedule.grouping.inlining import inline
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.graph import info
from aottrain.ir.kernels.traffic import moved_bytes
from aottrain.ir.ops import OpKind
from aottrain.ir.schedule import KernelCall, Schedule
from aottrain.runtime.executor import Runner
from aottrain.runtime.launch import Launch, scheduled_runner
from aottrain.toolchain.native import find_compiler
from tests.compiler.lowering.lowering_runs import Case, Planned, evaluated, link
from tests.compiler.programs import joint_of, leaf

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")


def _rotate(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def rotary(x: Tensor, y: Tensor) -> Tensor:
    return x * y + _rotate(x) * y


def rotary_across(x: Tensor, y: Tensor) -> Tensor:
    return x.transpose(0, 1) * y.transpose(0, 1) + _rotate(x.transpose(0, 1)) * y.transpose(0, 1)


def rotary_of_part(x: Tensor, y: Tensor) -> Tensor:
    left, right, rest = x[..., :3], x[..., 3:6], x[..., 6:]
    return torch.cat((left * y[..., :3] - right, right * y[..., :3] + left, rest), -1)


def norm_and_rotary(x: Tensor, y: Tensor) -> Tensor:
    normal = x * (x.square().sum(-1, keepdim=True) + 1).sqrt()
    return normal * y + _rotate(normal) * y


def padded(x: Tensor, y: Tensor) -> Tensor:
    return F.pad(x / y, (2, 1, 1, 0), value=0.5)


def flipped(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).flip(0, 1) * y


def rolled(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).roll(3, 1)


def put(x: Tensor, y: Tensor) -> Tensor:
    return torch.slice_scatter(x, y[:, 1:4] * 2 - x[:, 4:7], 1, 5, 8)


def stacked(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack((x + y, x - y), 0)


def filled(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > y, x, torch.zeros_like(x)) * y.new_full((), 3)


def through_steps(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((-(x * y)[:, ::2], (x + y)[1:2].expand(x.shape)), 1)


def rotary_beside_another(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((rotary(x, y), x[:, :4] - y[:, :4]), 1)


def rolled_twice(x: Tensor, y: Tensor) -> Tensor:
    return ((x * y).roll(3, 1) - x).roll((2, -3), (0, 1))


def windows_rolled(x: Tensor, y: Tensor) -> Tensor:
    """Rows of the copy are read by one index, which runs through two of its dimensions."""
    return (x * y).unflatten(1, (2, 5)).transpose(1, 2).contiguous().view(35, 2).roll(4, 0)


def part_of_parts_padded(x: Tensor, y: Tensor) -> Tensor:
    return F.pad(torch.cat((x, -y), 1)[:, 3:12], (1, 2, 2, 1), value=0.5)


def repeated_and_padded(x: Tensor, y: Tensor) -> Tensor:
    return F.pad(F.interpolate(x[None, None], scale_factor=2, mode="nearest")[0, 0, 1:] * 3, (3, 1))


PROGRAMS = (rotary, rotary_across, rotary_of_part, norm_and_rotary, padded, flipped, rolled, put, stacked, filled,
            through_steps, rotary_beside_another, rolled_twice, windows_rolled, part_of_parts_padded,
            repeated_and_padded)  # fmt: skip


def _planned(program: Callable[..., Tensor], number: int, *args: Tensor) -> Planned:
    graph = joint_of(program, *args).graph
    return Planned(Case(program, args), graph, schedule(graph, f"of_{number}_"), 1)


def working(planned: Schedule) -> list[str]:
    """Kernels and library calls, without views."""
    free = (OpKind.VIEW, OpKind.STRUCTURE, OpKind.SIZE)
    return [
        call.kernel.name if isinstance(call, KernelCall) else info(call).name
        for call in planned.calls
        if isinstance(call, KernelCall) or info(call).kind not in free
    ]


def _run(planned: Planned, launches: Mapping[str, Launch]) -> Tensor:
    runner: Runner = scheduled_runner(planned.graph, planned.schedule, dict(launches))
    inputs = [*planned.case.tensors, torch.tensor([0, 0])]
    return runner(inputs[: sum(node.op == "placeholder" for node in planned.graph.nodes)])[0]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_are_those_of_eager(dtype):
    """Those of one kernel each; all of them compiled together."""
    x, y = leaf(7, 10).detach().to(dtype), leaf(7, 10, seed=1).detach().to(dtype) + 3
    planned = [_planned(program, number, x, y) for number, program in enumerate(PROGRAMS)]
    launches = link(planned)
    for one in planned:
        name = one.case.op.__name__
        wanted = one.case.op(x, y)
        assert len(one.schedule.kernels) == len(working(one.schedule)) == 1, name
        for got in (_run(one, launches), _run(one, evaluated(one))):
            assert got.shape == wanted.shape, name
            same = one.case.op is not norm_and_rotary  # which adds up a row
            assert torch.equal(got, wanted) if same else torch.allclose(got, wanted, rtol=1e-2, atol=1e-2), name


def test_a_rotary_embedding_reads_its_input_once_and_writes_its_result():
    x, y = leaf(64, 128).detach(), leaf(64, 128, seed=1).detach()
    (call,) = _planned(norm_and_rotary, 0, x, y).schedule.kernels
    assert moved_bytes(call.kernel) == 3 * 4 * x.numel()


def dear(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((x.exp(), y), -1)


def result_as_well(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, torch.cat((total, y), -1)


def of_four(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((x[:2] + x[2:4] + x[4:6] + x[6:], y[:2]), -1)


def of_a_sine(x: Tensor, y: Tensor) -> Tensor:
    wave = x.sin()
    return torch.cat((-wave, y), -1) + torch.cat((wave, y), -1).exp()


def before_a_product(x: Tensor, y: Tensor) -> Tensor:
    total = x - y
    return torch.cat((total, x @ y), -1)


@pytest.mark.parametrize("program", [dear, result_as_well, of_four, before_a_product], ids=lambda p: p.__name__)
def test_what_is_better_stored(program):
    """Dear, in memory anyway, made of more than it is, or of what would live across a product."""
    x, y = leaf(8, 8).detach(), leaf(8, 8, seed=1).detach()
    assert not inline(joint_of(program, x, y).graph).rules


def test_what_another_call_stores_may_be_read():
    x, y = leaf(8, 8).detach(), leaf(8, 8, seed=1).detach()
    found = inline(joint_of(of_a_sine, x, y).graph)
    assert "neg" not in {node.name for node in found.needed}


def recurrence(steps: int, x: Tensor, y: Tensor) -> Tensor:
    """Each step reads the one before it twice."""
    state = x.exp()
    for _ in range(steps):
        state = torch.maximum(state * 2, state + y)
    return torch.cat((state[:, 1:], y), 1)


def test_a_recurrence_is_looked_through_once_and_not_by_each_way(monkeypatch):
    """The ways from the last step back to the first double with each step: a scan of forty would take for ever."""
    right, asked = cheap.cheap_rule, []
    monkeypatch.setattr(cheap, "cheap_rule", lambda node, dear=False: asked.append(node) or right(node, dear))
    x, y = leaf(8, 8).detach(), leaf(8, 8, seed=1).detach()
    counts = []
    for steps in (5, 10):
        inline(joint_of(lambda a, b, steps=steps: recurrence(steps, a, b), x, y).graph)
        counts.append(len(asked) - sum(counts))
    assert counts[1] < 3 * counts[0]
