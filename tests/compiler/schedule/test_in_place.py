"""Which results take the memory of an operand that dies there; and of arenas and blocks, which may be used again."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aottrain
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.schedule import Schedule
from aottrain.ir.tensor import tensor_spec
from aottrain.runtime import arena
from aottrain.runtime.arena import ArenaLayout
from tests.compiler.programs import joint_of

W = torch.randn(8, 8)


def in_place(function: Callable[..., Any]) -> Schedule:
    return schedule(joint_of(function, torch.randn(8, 8), W).graph)


def test_a_product_is_written_over_by_what_alone_reads_it():
    (operand,) = in_place(lambda x, w: (x @ w).sin()).in_place.values()
    assert operand.target is torch.ops.aten.mm.default


def test_a_convolutions_gradient_is_written_over_by_what_alone_reads_it():
    """It is an item of a tuple."""

    def twice(x: Any, w: Any) -> Any:
        return torch.conv2d(torch.conv2d(x, w, padding=1).relu(), w, padding=1)

    images, weight = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(4, 4, 3, 3)
    parts = aottrain.apply_partition(joint := joint_of(twice, images, weight), aottrain.plan_partition(joint))
    written_over = [node for node in schedule(parts.backward).in_place.values() if node.target is operator.getitem]
    assert [node.args[0].target for node in written_over] == [torch.ops.aten.convolution_backward.default]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: ((h := x @ w).sin() @ w) + h,  # again after another product
        lambda x, w: (((h := x @ w) * 2) @ w).sin() + (h @ w).cos(),
    ],
)
def test_what_is_read_later_keeps_its_memory(function):
    planned = in_place(function)
    position = {node: i for i, call in enumerate(planned.calls) for node in getattr(call, "writes", (call,))}
    assert planned.in_place
    for result, operand in planned.in_place.items():
        reads = [i for i, call in enumerate(planned.calls)
                 if operand in (getattr(call, "reads", None) or getattr(call, "all_input_nodes", ()))]  # fmt: skip
        assert max(reads) == position[result], f"{operand} is read after {result} took its memory"


def test_what_is_read_at_another_place_keeps_its_memory():
    assert not in_place(lambda x, w: (x @ w).t().contiguous().sin()).in_place
    assert not in_place(lambda x, w: (x @ w).flip(0).sin()).in_place
    assert not in_place(lambda x, w: (x @ w).softmax(-1)).in_place


def test_a_result_is_written_over_what_it_is_made_of():
    """And over nothing else that dies there: a compiler may store it before it loads that."""

    def function(x: Any, w: Any) -> Any:
        first, second = x @ w, w @ x
        total = (first * second).sum(0)
        made = second.sin()
        return made @ w, total, made.sum(0)

    planned = in_place(function)
    (operand,) = {
        operand for result, operand in planned.in_place.items() if result.target is torch.ops.aten.sin.default
    }
    assert operand.name == "mm_1"


def test_what_the_caller_holds_keeps_its_memory():
    assert not in_place(lambda x, w: ((h := x @ w), h.sin())).in_place
    assert not in_place(lambda x, w: x.sin()).in_place


def test_calls_in_flight_have_arenas_of_their_own():
    layout = ArenaLayout(1 << 20, (), torch.device("cpu"), object())
    first = layout.take()
    layout.give(first)
    assert layout.take() is first
    second = layout.take()
    assert second is not first and second.memory.data_ptr() != first.memory.data_ptr()


def test_a_block_that_nothing_refers_to_is_used_again():
    holder, spec = object(), tensor_spec(torch.empty(64))
    first = arena.residual(holder, spec)
    second = arena.residual(holder, spec)
    assert first.data_ptr() != second.data_ptr()
    (blocks,) = [known for (owner, *_), known in arena._blocks.items() if owner is holder]
    before, address = set(map(id, blocks)), first.data_ptr()
    del first
    again = arena.residual(holder, spec)
    assert set(map(id, blocks)) == before and again.data_ptr() == address


def test_what_another_holder_keeps_goes_before_a_run():
    layout, spec = ArenaLayout(1 << 20, (), torch.device("cpu"), holder := object()), tensor_spec(torch.empty(64))
    arena.begin(holder)
    layout.give(layout.take())
    kept = arena.residual(holder, spec)
    arena.begin(holder)
    assert arena.held_bytes() >= (1 << 20) + 256
    arena.begin(object())
    assert arena.held_bytes() < 1 << 20 and kept is not None
    assert any(owner is holder for owner, *_ in arena._blocks), "what is referred to stays"
